from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from expert_daemon.hot_list import HotList, hottest_first, read_hot_list
from expert_daemon.log import flush
from expert_daemon.model_state import ModelState
from expert_daemon.saver import Saver
from protocol.arena.layout import HEADER, SlotState

MODEL = b"m" * 16


FIELDS = ("state", "layer", "expert", "score", "last_use")


def headers(*entries):
    """Headers of (state, layer, expert, score, last use)."""
    made = np.zeros(len(entries), HEADER)
    for header, entry in zip(made, entries, strict=True):
        for name, value in zip(FIELDS, entry, strict=True):
            header[name] = value
    return made


READY = SlotState.READY
SOME = headers(
    (READY, 0, 1, 2.0, 5),
    (READY, 1, 7, 9.0, 1),
    (SlotState.LOADING, 0, 3, 50.0, 9),
    (READY, 2, 2, 2.0, 6),
)


def test_the_hottest_comes_first_and_of_equals_the_last_used():
    assert hottest_first(SOME).tolist() == [(1, 7), (2, 2), (0, 1)]


def test_the_list_reads_back_whatever_became_of_the_shards(state_dir):
    HotList(ModelState(state_dir, MODEL, 1), SOME).save()
    found = read_hot_list(ModelState(state_dir, MODEL, 2))
    assert found.tolist() == [(1, 7), (2, 2), (0, 1)]
    assert len(read_hot_list(ModelState(state_dir, b"o" * 16, 1))) == 0


def test_it_is_written_where_it_changed_and_not_by_an_empty_arena(state_dir):
    state = ModelState(state_dir, MODEL, 1)
    made = SOME.copy()
    hot = HotList(state, made)
    hot.save()
    path = state.directory / "hot"
    first = path.stat().st_mtime_ns
    hot.save()
    assert path.stat().st_mtime_ns == first
    made["state"] = SlotState.FREE
    hot.save()
    assert len(read_hot_list(state)) == 3


def test_without_saving_nothing_is_written(state_dir):
    HotList(ModelState(state_dir, MODEL, 1, save=False), SOME).save()
    assert list(state_dir.iterdir()) == []


def test_jobs_run_now_and_then_and_once_at_the_end():
    calls = []
    saver = Saver([lambda: calls.append("a"), lambda: calls.append("b")], period_s=0.01)
    end = time.monotonic() + 5
    while len(calls) < 6:
        assert time.monotonic() < end
        time.sleep(0.005)
    saver.close()
    n_calls = len(calls)
    assert calls[-2:] == ["a", "b"]
    time.sleep(0.03)
    assert len(calls) == n_calls
    idle = []
    Saver([lambda: idle.append(1)], period_s=60).close()
    assert idle == [1]


def test_what_is_wanted_is_saved_at_once_and_what_came_before_the_end_by_then():
    saved, wanted = [], threading.Event()
    values = iter(range(100))
    saver = Saver([lambda: saved.append(next(values))], period_s=60, wanted=wanted)
    wanted.set()
    end = time.monotonic() + 5
    while not saved:
        assert time.monotonic() < end
        time.sleep(0.005)
    for _ in range(50):  # these are one more
        wanted.set()
    saver.close()
    assert saved in ([0, 1], [0, 1, 2])


@pytest.mark.parametrize("period_s", [0.001, 60.0], ids=["under way", "the last"])
def test_a_write_that_hangs_does_not_keep_the_end_which_says_so(period_s, capfd):
    hangs = threading.Event()

    def hang():
        hangs.wait(10)

    saver = Saver([hang], period_s=period_s)
    time.sleep(0.05)
    began = time.monotonic()
    saver.close(timeout=0.1)
    assert time.monotonic() - began < 2
    hangs.set()
    flush()
    assert capfd.readouterr().err.count("ends without its last save") == 1
