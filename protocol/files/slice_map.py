"""Where each expert's bytes lie in the shards, and where they go in a slot.

The slot image is the same for every source of weights: the pieces in the order of PIECES, each at a
multiple of PIECE_ALIGN bytes, the whole a multiple of SLOT_ALIGN. A slot's checksum is the xxh3_64
of its pieces' bytes in that order, without padding. gate = w1, up = w3, down = w2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .model_config import ModelConfig
from .safetensors_index import Shard

PIECES = ("gate", "gate_scale", "up", "up_scale", "down", "down_scale")
PIECE_ALIGN = 256
SLOT_ALIGN = 4096


@dataclass(frozen=True, slots=True)
class SlotImage:
    """Layout of one expert in a slot; tuples are parallel to PIECES, a piece may have 0 bytes."""

    piece_offsets: tuple[int, ...]
    piece_bytes: tuple[int, ...]
    slot_bytes: int

    @classmethod
    def of_pieces(cls, piece_bytes: tuple[int, ...]) -> SlotImage:
        """Place pieces of these sizes one after the other."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Slice:
    """One piece of one expert: bytes at `offset` of the shard go to `slot_offset` of a slot."""

    shard: Shard
    offset: int
    n_bytes: int
    dtype: str
    shape: tuple[int, ...]
    slot_offset: int
    piece: str


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A range of bytes of one shard."""

    shard: Shard
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class EngramTable:
    """One Engram table: row r lies at values.offset + r * value_bytes, its scales alike."""

    index: int
    layer: int
    n_rows: int
    values: ByteRange
    scales: ByteRange
    value_bytes: int
    scale_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the ring: values, then scales."""
        return self.value_bytes + self.scale_bytes


class SliceMap:
    """Key to slices, kept as arrays: 92,160 slices of the real model cost about 1 MB."""

    def __init__(
        self,
        config: ModelConfig,
        image: SlotImage,
        shards: tuple[Shard, ...],
        shard_numbers: NDArray[np.int32],  # [n_layers, n_experts, 6], position in `shards`
        offsets: NDArray[np.int64],  # [n_layers, n_experts, 6], from the start of the file
    ) -> None:
        self.config = config
        self.image = image
        self.shards = shards
        self.shard_numbers = shard_numbers
        self.offsets = offsets

    def slices(self, layer: int, expert: int) -> tuple[Slice, ...]:
        """Return one expert's slices in the order of PIECES, empty pieces left out."""
        raise NotImplementedError
