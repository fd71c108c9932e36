"""The released model's sizes over sparse shards: the last row and the last expert."""

from __future__ import annotations

import numpy as np
import pytest

from expert_daemon.direct_io import aligned_buffer
from expert_daemon.range_reader import RangeReader
from expert_daemon.read_plan import Fragment, plan_parts
from expert_daemon.row_table import MAX_BATCH_BYTES, RowTable
from expert_daemon.source import FileSource
from protocol.files.checkpoint import Checkpoint, open_checkpoint
from protocol.files.safetensors_header import Shard
from tests.support.released_config import write_released_headers


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("released")
    try:
        write_released_headers(directory)
    except OSError as error:
        pytest.skip(f"no sparse files of this size here: {error}")
    return open_checkpoint(directory)


def mark(shard: Shard, offset: int, data: bytes) -> None:
    with shard.path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_the_last_rows_of_a_table_of_100_gb_are_read(released: Checkpoint) -> None:
    table = released.engram_tables[1]
    assert table.n_rows * table.row_bytes > 100e9
    rows = np.array([0, 16_268_816, table.n_rows - 1], np.int64)  # row 16,268,816 x 264 > 2^32
    wanted = np.arange(3 * 264, dtype=np.uint32).astype(np.uint8).reshape(3, 264)
    for row, data in zip(rows.tolist(), wanted, strict=True):
        mark(table.values.shard, table.values.offset + row * 256, data[:256].tobytes())
        mark(table.scales.shard, table.scales.offset + row * 8, data[256:].tobytes())
    source = FileSource(released.shards, direct=True)
    try:
        reader = RowTable(table, released.shards, RangeReader(source))
        found, faults, _ = reader.read(rows, aligned_buffer(MAX_BATCH_BYTES))
    finally:
        source.close()
    assert not faults
    assert np.array_equal(found, wanted)


def test_every_expert_of_the_last_layer_lies_where_its_header_says(released: Checkpoint) -> None:
    slices = released.slice_map.slices(39, 383)
    assert {part.shard.path.name for part in slices} == {"model-00040-of-00048.safetensors"}
    assert slices[0].offset > 2**32
    for number, part in enumerate(slices):
        mark(part.shard, part.offset + part.n_bytes - 1, bytes([number + 1]))
    numbers = {shard: number for number, shard in enumerate(released.shards)}
    fragments = [Fragment(numbers[p.shard], p.offset, p.n_bytes, p.slot_offset) for p in slices]
    slot = aligned_buffer(released.slice_map.image.slot_bytes)
    slot[:] = 0xEE
    source = FileSource(released.shards, direct=True)
    try:
        ranges, bounce = RangeReader(source), aligned_buffer(MAX_BATCH_BYTES * 2)
        address = int(slot.__array_interface__["data"][0])
        for planned in plan_parts(fragments):
            ranges.read_part(planned, slot, address, bounce)
    finally:
        source.close()
    ends = [part.slot_offset + part.n_bytes - 1 for part in slices]
    assert slot[ends].tolist() == [1, 2, 3, 4, 5, 6]
    assert int(slot.astype(np.uint32).sum()) == 21
