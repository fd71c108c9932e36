"""Where direct reads put their bytes: into the slot itself, or into the bounce buffer."""

from __future__ import annotations

import numpy as np
import pytest

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


def test_through_the_page_cache_each_fragment_goes_to_its_place_and_nothing_beside_it(tmp_path):
    content = np.random.default_rng(0).integers(1, 256, N_BYTES, np.uint8)
    path = tmp_path / "shard"
    path.write_bytes(content.tobytes())
    files = NotingSource([Shard(path, N_BYTES)], direct=False)
    slot, bounce = aligned_buffer(N_BYTES), aligned_buffer(2 << 20)
    first = slot.__array_interface__["data"][0]
    fragments = [Fragment(0, 11, 1 << 20, 2 << 20), Fragment(0, (1 << 20) + 100, 5000, 3)]
    for part in plan_parts(fragments):
        RangeReader(files, straight=False).read_part(part, slot, first, bounce)
    files.close()
    wanted = np.zeros(N_BYTES, np.uint8)
    for _, offset, n_bytes, place in fragments:
        wanted[place : place + n_bytes] = content[offset : offset + n_bytes]
    assert all(first <= address < first + N_BYTES for address in files.addresses)
    assert slot.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(("bounce_bytes", "n_shown"), [(2 << 20, 3), (256 << 10, 0)])
def test_a_part_is_shown_before_it_is_copied_where_the_bounce_buffer_holds_it(
    source, bounce_bytes, n_shown
):
    slot, bounce = aligned_buffer(N_BYTES), aligned_buffer(bounce_bytes)
    shown = []

    def show(window, first):
        assert not slot[first : first + len(window)].any()
        shown.append((first, window.tobytes()))

    ranges = RangeReader(source, straight=False)
    for part in plan_parts([Fragment(0, 0, N_BYTES, 0)]):
        ranges.read_part(part, slot, slot.__array_interface__["data"][0], bounce, show)
    content = source.path(0).read_bytes()
    assert len(shown) == n_shown
    assert all(content[first:].startswith(window) for first, window in shown)
    assert slot.tobytes() == content
