"""Where direct reads put their bytes: into the slot itself, or into the bounce buffer."""

from __future__ import annotations

import numpy as np
import pytest

from expert_daemon import populate
from expert_daemon.direct_io import aligned_buffer
from expert_daemon.range_reader import RangeReader
from expert_daemon.read_plan import Fragment, plan_parts
from expert_daemon.source import FileSource
from protocol.files.safetensors_index import Shard

N_BYTES = 3 << 20


class NotingSource(FileSource):
    """Notes the addresses that are read to."""

    def __init__(self, shards, *, direct):
        super().__init__(shards, direct=direct)
        self.addresses = []

    def read_into(self, shard, offset, memory, kind):
        self.addresses.append(memory.__array_interface__["data"][0])
        return super().read_into(shard, offset, memory, kind)


@pytest.fixture
def source(tmp_path):
    content = np.random.default_rng(0).integers(0, 256, N_BYTES, np.uint8)
    path = tmp_path / "shard"
    path.write_bytes(content.tobytes())
    files = NotingSource([Shard(path, N_BYTES)], direct=True)
    if files.alignment(0) == 1:
        pytest.skip("no direct reads on this file system")
    yield files
    files.close()


@pytest.mark.parametrize("straight", [True, False])
def test_aligned_parts_go_to_the_slot_only_where_that_pays(source, straight):
    slot, bounce = aligned_buffer(N_BYTES), aligned_buffer(2 << 20)
    first = slot.__array_interface__["data"][0]
    ranges = RangeReader(source, straight=straight)
    for part in plan_parts([Fragment(0, 0, N_BYTES, 0)]):
        ranges.read_part(part, slot, first, bounce)
    in_slot = [first <= address < first + N_BYTES for address in source.addresses]
    assert all(in_slot) if straight else not any(in_slot)
    assert slot.tobytes() == source.path(0).read_bytes()


@pytest.mark.parametrize(
    ("choice", "n_bytes", "wanted"),
    [
        ("always within_size advise [never] deny force", 8 << 30, False),
        ("always within_size [advise] never deny force", 8 << 30, True),
        ("always within_size [advise] never deny force", 8 << 20, False),
        ("", 8 << 30, False),
    ],
)
def test_an_arena_has_huge_pages_where_the_host_gives_them(
    tmp_path, monkeypatch, choice, n_bytes, wanted
):
    path = tmp_path / "shmem_enabled"
    if choice:
        path.write_text(choice)
    monkeypatch.setattr(populate, "_SHMEM_ENABLED", path)
    assert populate.may_have_huge_pages(n_bytes) is wanted
