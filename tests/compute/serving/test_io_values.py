from __future__ import annotations

from compute.experts.request_io import IoCounters
from compute.serving.worker import _io_values


def test_hits_are_told_by_the_tier_of_memory() -> None:
    told = _io_values(IoCounters(hits=5, misses=1, bytes_read=7, stall_ms=2.0, copy_ms=1.0))
    assert told == {
        "hits": 5,
        "hits_arena": 5,
        "misses": 1,
        "bytes_read": 7,
        "stall_ms": 2.0,
        "copy_ms": 1.0,
    }
    told = _io_values(IoCounters(hits=5, hits_device=2))
    assert (told["hits"], told["hits_arena"], told["hits_device"]) == (5, 3, 2)


def test_every_counter_is_of_the_time_since() -> None:
    earlier = IoCounters(1, 2, 3, 4.0, 5.0, 1)
    assert IoCounters(11, 22, 33, 44.0, 55.0, 6).since(earlier) == IoCounters(
        10, 20, 30, 40.0, 50.0, 5
    )
