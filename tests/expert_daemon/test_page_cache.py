"""What reads leave in the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from pathlib import Path

import numpy as np
import pytest

from expert_daemon.source import FileSource
from expert_daemon.tuned import Reading
from expert_daemon.tuning import _reader
from protocol.files.checkpoint import Checkpoint, open_checkpoint
from tests.support.fake_checkpoint import write_fake_checkpoint

N_LAYERS, N_EXPERTS, TOP_K = 6, 16, 2
N_READS = 10_000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("model")
    write_fake_checkpoint(directory, n_layers=N_LAYERS, n_experts=N_EXPERTS, top_k=TOP_K)
    return open_checkpoint(directory)


def cached_bytes(path: Path) -> int:
    """Bytes of a file that are in the page cache; looking reads none."""
    libc = ctypes.CDLL(None, use_errno=True)
    n_bytes = path.stat().st_size
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), n_bytes, prot=mmap.PROT_READ)
    view = np.frombuffer(mapping, np.uint8)
    found = np.zeros(-(-n_bytes // mmap.PAGESIZE), np.uint8)
    status = libc.mincore(
        ctypes.c_void_p(view.ctypes.data),
        ctypes.c_size_t(n_bytes),
        ctypes.c_void_p(found.ctypes.data),
    )
    assert status == 0
    return int((found & 1).sum()) * mmap.PAGESIZE


def drop(checkpoint: Checkpoint) -> None:
    for shard in checkpoint.shards:
        descriptor = os.open(shard.path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def in_cache(checkpoint: Checkpoint) -> int:
    return sum(cached_bytes(shard.path) for shard in checkpoint.shards)


def read_many(checkpoint: Checkpoint, mode: str, n_reads: int) -> None:
    chance = random.Random(1)
    with _reader(checkpoint, Reading(mode=mode, threads=4)) as read:
        for _ in range(n_reads // TOP_K):
            read(
                [
                    (chance.randrange(N_LAYERS), expert)
                    for expert in chance.sample(range(N_EXPERTS), TOP_K)
                ]
            )
        if mode == "buffered":  # before the end, which tidies up
            keys = [(layer, expert) for layer in range(N_LAYERS) for expert in range(N_EXPERTS)]
            slices = [one for key in keys for one in checkpoint.slice_map.slices(*key)]
            assert in_cache(checkpoint) >= sum(one.n_bytes for one in slices)


@pytest.mark.slow
def test_ten_thousand_direct_reads_leave_the_page_cache_as_it_was(checkpoint: Checkpoint) -> None:
    source = FileSource(checkpoint.shards, direct=True)
    refused = source.alignment(0) == 1
    source.close()
    if refused:
        pytest.skip("this file system refuses O_DIRECT")
    drop(checkpoint)
    read_many(checkpoint, "direct", 100)
    before = in_cache(checkpoint)
    read_many(checkpoint, "direct", N_READS)
    assert in_cache(checkpoint) <= before


def test_buffered_reads_stay_where_buffered_was_chosen(checkpoint: Checkpoint) -> None:
    drop(checkpoint)
    read_many(checkpoint, "buffered", 1000)
