from __future__ import annotations

from pathlib import Path

import pytest

from expert_daemon.direct_io import bounce_buffer


def flags_of(address):
    """The kernel's flags of the mapping that an address lies in."""
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, stop = (int(one, 16) for one in first.split("-"))
            is_there = start <= address < stop
        elif is_there and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("not mapped")


@pytest.mark.parametrize("n_bytes", [1, 4096, 5000, (4 << 20) + 4096])
def test_memory_to_read_into_is_aligned_and_as_long_as_asked(n_bytes):
    memory = bounce_buffer(n_bytes)
    assert memory.ctypes.data % 4096 == 0
    assert len(memory) == -(-n_bytes // 4096) * 4096
    assert not memory.any()
    memory[:] = 255
    assert memory.min() == 255


def test_no_child_shares_memory_that_is_read_into():
    memory = bounce_buffer(4 << 20)
    memory[:] = 1
    assert "dc" in flags_of(memory.ctypes.data)
