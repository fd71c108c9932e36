"""Where each expert's bytes lie in the shards, and where they go in a slot.

The slot image is the same for every source of weights: the pieces in the order of PIECES, each at a
multiple of PIECE_ALIGN bytes, the whole a multiple of SLOT_ALIGN. A slot's checksum is the xxh3_64
of its pieces' bytes in that order, without padding. gate = w1, up = w3, down = w2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .model_config import ModelConfig
from .safetensors_index import Shard, TensorEntry, dtype_bytes
from .tensor_table import ExpectedTensor, expert_piece_names, expert_pieces

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
        if len(piece_bytes) != len(PIECES):
            raise ValueError(f"{len(piece_bytes)} piece sizes, wanted {len(PIECES)}")
        offsets: list[int] = []
        end = 0
        for n_bytes in piece_bytes:
            start = _rounded_up(end, PIECE_ALIGN)
            offsets.append(start)
            end = start + n_bytes
        return cls(tuple(offsets), piece_bytes, _rounded_up(end, SLOT_ALIGN))

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in the shards: the pieces without padding."""
        return sum(self.piece_bytes)


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
    """Key to slices, kept as two arrays: 1.1 MB for the real model's 92,160 slices."""

    def __init__(
        self,
        config: ModelConfig,
        pieces: tuple[ExpectedTensor, ...],  # dtype and shape of each piece, parallel to PIECES
        shards: tuple[Shard, ...],
        shard_numbers: NDArray[np.int32],  # [n_layers, n_experts, 6], position in `shards`
        offsets: NDArray[np.int64],  # [n_layers, n_experts, 6], from the start of the file
    ) -> None:
        self.config = config
        self.pieces = pieces
        self.image = SlotImage.of_pieces(
            tuple(dtype_bytes(piece.dtype, piece.shape) for piece in pieces)
        )
        self.shards = shards
        self.shard_numbers = shard_numbers
        self.offsets = offsets

    @classmethod
    def build(
        cls, config: ModelConfig, shards: tuple[Shard, ...], tensors: Mapping[str, TensorEntry]
    ) -> SliceMap:
        """Collect the experts' slices from tensors that have been checked against the config."""
        number_of = {shard.path: number for number, shard in enumerate(shards)}
        size = (config.n_layers, config.n_experts, len(PIECES))
        rows = [
            tensors[name]
            for layer in range(config.n_layers)
            for expert in range(config.n_experts)
            for name in expert_piece_names(layer, expert)
        ]
        numbers = np.array([number_of[row.shard.path] for row in rows], np.int32).reshape(size)
        offsets = np.array([row.offset for row in rows], np.int64).reshape(size)
        numbers.flags.writeable = False
        offsets.flags.writeable = False
        return cls(config, expert_pieces(config), shards, numbers, offsets)

    def slices(self, layer: int, expert: int) -> tuple[Slice, ...]:
        """Return one expert's slices in the order of PIECES, empty pieces left out.

        Raises ValueError on a layer or expert that the model does not have.
        """
        config = self.config
        if not (0 <= layer < config.n_layers and 0 <= expert < config.n_experts):
            raise ValueError(
                f"layer {layer} expert {expert}: the model has {config.n_layers} layers "
                f"of {config.n_experts} experts"
            )
        numbers = self.shard_numbers[layer, expert].tolist()
        offsets = self.offsets[layer, expert].tolist()
        image = self.image
        return tuple(
            Slice(
                shard=self.shards[numbers[number]],
                offset=offsets[number],
                n_bytes=image.piece_bytes[number],
                dtype=piece.dtype,
                shape=piece.shape,
                slot_offset=image.piece_offsets[number],
                piece=PIECES[number],
            )
            for number, piece in enumerate(self.pieces)
            if image.piece_bytes[number]
        )


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
