from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from protocol.arena.mapping import map_file
from protocol.arena.rooms import HUGE_BYTES

N_BYTES = 3 * 4096


@pytest.fixture
def file():
    """An empty file in shared memory."""
    descriptor = os.memfd_create("test-mapping")
    os.ftruncate(descriptor, N_BYTES)
    yield descriptor
    os.close(descriptor)


def n_mappings() -> int:
    return Path("/proc/self/maps").read_text(encoding="ascii").count("memfd:test-mapping")


@pytest.mark.parametrize("writable", [True, False])
def test_a_mapping_is_the_file_at_an_address_for_huge_pages_and_goes_with_its_last_view(
    file, writable
):
    os.pwrite(file, b"before", 4096)
    view = map_file(file, N_BYTES, writable=writable)
    array = np.frombuffer(view, np.uint8)
    assert array.__array_interface__["data"][0] % HUGE_BYTES == 0
    assert array.flags.writeable is writable
    assert len(view) == N_BYTES
    assert bytes(view[4096:4102]) == b"before"
    os.pwrite(file, b"after!", 4096)
    assert array[4096:4102].tobytes() == b"after!"
    if writable:
        array[:3] = 7
        assert os.pread(file, 3, 0) == b"\7\7\7"
    del view
    gc.collect()
    assert n_mappings() == 1
    assert array[4096:4102].tobytes() == b"after!"
    del array
    gc.collect()
    assert n_mappings() == 0


def test_what_cannot_be_mapped_is_an_error_and_leaves_nothing(file):
    before = len(Path("/proc/self/maps").read_text(encoding="ascii").splitlines())
    read_only = os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
    with pytest.raises(PermissionError):
        map_file(read_only, N_BYTES, writable=True)
    os.close(read_only)
    gc.collect()
    after = len(Path("/proc/self/maps").read_text(encoding="ascii").splitlines())
    assert after <= before + 1
