"""The bytes that an expert and a row must have, straight from the checkpoint's files."""

from __future__ import annotations

import numpy as np

from protocol.files.checkpoint import Checkpoint
from protocol.wire.client import ExpertClient


def read_range(path, offset: int, n_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(n_bytes)


def expert_bytes(checkpoint: Checkpoint, layer: int, expert: int) -> bytes:
    """The pieces of one expert, one after the other, without padding."""
    return b"".join(
        read_range(s.shard.path, s.offset, s.n_bytes)
        for s in checkpoint.slice_map.slices(layer, expert)
    )


def slot_bytes(client: ExpertClient, slot: int) -> bytes:
    """The pieces that a slot of the arena holds, without padding."""
    view = client.slot_view(slot)
    pieces = (
        view.gate,
        view.gate_scale,
        view.up,
        view.up_scale,
        view.down,
        view.down_scale,
    )
    return b"".join(bytes(piece) for piece in pieces)


def table_rows(checkpoint: Checkpoint, table: int, rows) -> np.ndarray:
    """Rows of an Engram table, u8 [n, row_bytes], values then scales."""
    t = checkpoint.engram_tables[table]
    found = [
        read_range(t.values.shard.path, t.values.offset + int(row) * t.value_bytes, t.value_bytes)
        + read_range(t.scales.shard.path, t.scales.offset + int(row) * t.scale_bytes, t.scale_bytes)
        for row in rows
    ]
    return np.frombuffer(b"".join(found), np.uint8).reshape(len(found), t.row_bytes)
