from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from expert_daemon.deep_reads import DEPTH, DeepReads, Reads
from expert_daemon.direct_io import aligned_buffer, open_direct
from expert_daemon.source import FileSource, ManyReads, read_one_by_one
from protocol.files.safetensors_index import Shard

PAGE = 4096
N_PAGES = 300
N_BYTES = N_PAGES * PAGE + 1000


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "pages.bin"
    content = np.random.default_rng(0).integers(0, 256, N_BYTES, dtype=np.uint8)
    path.write_bytes(content.tobytes())
    opened = open_direct(path)
    if opened is None:
        pytest.skip("this file system knows no direct reads")
    return opened[0], content


@pytest.fixture
def deep():
    try:
        reads = DeepReads()
    except OSError as error:
        pytest.skip(f"this machine has no Linux AIO: {error}")
    yield reads
    reads.close()


def test_more_reads_than_the_queue_holds_all_come(file, deep):
    descriptor, content = file
    pages = np.random.default_rng(1).integers(0, N_PAGES, 5 * DEPTH + 3)
    buffer = aligned_buffer(len(pages) * PAGE)
    addresses = buffer.ctypes.data + np.arange(len(pages)) * PAGE
    sizes = np.full(len(pages), PAGE)
    for _ in range(2):
        buffer[:] = 0
        came = deep.read(Reads(np.full(len(pages), descriptor), pages * PAGE, sizes, addresses))
        assert (came == PAGE).all()
        assert (
            buffer.reshape(-1, PAGE) == content[: N_PAGES * PAGE].reshape(-1, PAGE)[pages]
        ).all()
    os.close(descriptor)


def test_each_read_has_its_own_result(file, deep):
    descriptor, _ = file
    buffer = aligned_buffer(4 * PAGE)
    at = buffer.ctypes.data
    reads = Reads(
        descriptors=np.array([descriptor, 999_999, descriptor, descriptor]),
        offsets=np.array([0, 0, N_PAGES * PAGE, 100 * N_BYTES // PAGE * PAGE]),
        n_bytes=np.full(4, PAGE),
        addresses=at + np.arange(4) * PAGE,
    )
    assert deep.read(reads).tolist() == [PAGE, -errno.EBADF, 1000, 0]
    os.close(descriptor)


def test_a_source_reads_many_as_it_reads_one(file, tmp_path):
    path = tmp_path / "pages.bin"
    source = FileSource([Shard(path, N_BYTES)], direct=True)
    pages = np.array([7, 0, N_PAGES, 12])
    reads = ManyReads(np.zeros(4, int), pages * PAGE, np.full(4, PAGE), np.arange(4) * PAGE)
    many, single = aligned_buffer(4 * PAGE), aligned_buffer(4 * PAGE)
    assert source.read_many(reads, many).tolist() == [PAGE, PAGE, 1000, PAGE]
    assert read_one_by_one(source, reads, single).tolist() == [PAGE, PAGE, 1000, PAGE]
    assert (many == single).all()
    source.close()
