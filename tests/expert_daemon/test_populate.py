from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from expert_daemon import populate as populating
from expert_daemon.populate import huge_bytes, populate, punch_hole
from protocol.arena.mapping import map_file
from protocol.arena.rooms import HUGE_BYTES

N_BYTES = 8 * HUGE_BYTES + 5 * 4096
FIRST, END = 3 * 4096, N_BYTES - 2 * 4096  # neither is a multiple of 2 MiB


@pytest.fixture
def arena():
    """(descriptor, mapping) of a file in shared memory without a page."""
    descriptor = os.memfd_create("test-populate")
    os.ftruncate(descriptor, N_BYTES)
    yield descriptor, np.frombuffer(map_file(descriptor, N_BYTES, writable=True), np.uint8)
    os.close(descriptor)


def n_bytes_of(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * 512


def fill(arena, first=FIRST, end=END):
    descriptor, memory = arena
    populate(memory, descriptor, [(first, end - first)], n_threads=2)


def needs_gathering(arena) -> None:
    """Skip where this kernel gathers no pages."""
    fill(arena)
    if not huge_bytes(arena[1]):
        pytest.skip("the kernel gathers no pages of shared memory")


def test_empty_memory_is_populated_in_huge_pages_and_not_a_byte_more_than_asked_for(arena):
    needs_gathering(arena)
    assert huge_bytes(arena[1]) == 7 * HUGE_BYTES  # the first block is not whole
    assert n_bytes_of(arena[0]) == END - FIRST
    assert not arena[1].any()


def test_pages_that_are_there_are_neither_moved_nor_changed(arena):
    descriptor, memory = arena
    memory[5 << 20] = 9
    fill(arena)
    assert n_bytes_of(descriptor) == END - FIRST
    assert memory[5 << 20] == 9
    assert memory.sum() == 9
    assert huge_bytes(memory) == 0  # all of them lie in one span


def test_a_hole_is_filled_by_huge_pages_again_and_the_rest_keeps_its_bytes(arena):
    needs_gathering(arena)
    descriptor, memory = arena
    memory[FIRST:END] = 5
    middle = 3 * HUGE_BYTES + 4096
    punch_hole(descriptor, middle, END - middle)
    assert n_bytes_of(descriptor) == middle - FIRST
    fill(arena, middle)
    assert n_bytes_of(descriptor) == END - FIRST
    assert (memory[FIRST:middle] == 5).all()
    assert not memory[middle:].any()
    assert huge_bytes(memory) >= 4 * HUGE_BYTES


def test_a_page_that_cannot_be_split_at_once_is_given_back_a_little_later(arena, monkeypatch):
    descriptor, _ = arena
    fill(arena)
    punch, calls = populating._punch, []

    def too_busy_at_first(*hole):
        calls.append(hole)
        if len(calls) > 2:
            punch(*hole)

    monkeypatch.setattr(populating, "_punch", too_busy_at_first)
    middle = 3 * HUGE_BYTES + 4096
    assert punch_hole(descriptor, middle, END - middle)
    assert calls == [(descriptor, middle, END - middle)] * 3
    assert n_bytes_of(descriptor) == middle - FIRST


def test_without_huge_pages_all_is_populated_in_small_ones(arena, monkeypatch):
    advise = populating._madvise

    def refused(memory, offset, n_bytes, advice):
        if advice == populating._MADV_COLLAPSE:
            return errno.EINVAL
        return advise(memory, offset, n_bytes, advice)

    monkeypatch.setattr(populating, "_madvise", refused)
    fill(arena)
    assert n_bytes_of(arena[0]) == END - FIRST


def test_where_the_kernel_tells_of_no_holes_nothing_is_gathered(arena, monkeypatch):
    def refused(_descriptor, _offset, _how):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "lseek", refused)
    fill(arena)
    assert n_bytes_of(arena[0]) == END - FIRST
    assert huge_bytes(arena[1]) == 0


def test_another_mapping_of_the_file_has_the_same_huge_pages(arena):
    needs_gathering(arena)
    again = np.frombuffer(map_file(arena[0], N_BYTES, writable=True), np.uint8)
    populate(again, arena[0], [(FIRST, END - FIRST)], n_threads=1)
    assert huge_bytes(again) == huge_bytes(arena[1])


@pytest.mark.parametrize(
    ("choice", "is_told"),
    [
        ("always within_size advise [never] deny force", True),
        ("always within_size advise never [deny] force", True),
        ("always within_size [advise] never deny force", False),
        (None, False),
    ],
)
def test_small_pages_are_told_of_where_the_host_can_be_told_otherwise(
    tmp_path, monkeypatch, choice, is_told
):
    path = tmp_path / "shmem_enabled"
    if choice:
        path.write_text(choice)
    lines: list[str] = []
    monkeypatch.setattr(populating, "_SHMEM_ENABLED", path)
    monkeypatch.setattr(populating, "log", lines.append)
    populating.tell_of_small_pages()
    assert [str(path) in line for line in lines] == [True] * is_told
