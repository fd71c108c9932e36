"""Where each expert's bytes lie in the shards, and where they go in a slot.

The slot image is the same for every source of weights: the pieces in the order of PIECES, each at a
multiple of PIECE_ALIGN bytes, the whole a multiple of SLOT_ALIGN. A slot's checksum is the xxh3_64
of its pieces' bytes in that order, without padding. gate = w1, up = w3, down = w2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .block_sizes import BLOCK_TYPE_OF_NAME
from .model_config import ModelConfig
from .safetensors_header import DTYPE_BITS
from .safetensors_index import Shard, TensorEntry, dtype_bytes
from .tensor_table import ExpectedTensor, expert_piece_names, expert_pieces

PIECES = ("gate", "gate_scale", "up", "up_scale", "down", "down_scale")
PIECE_ALIGN = 256
SLOT_ALIGN = 4096
RECORD = "record"  # the piece of a slice that is a whole slot image, or a part of one
FP4 = "FP4"  # name of the official format: I8 matrix, F8_E8M0 scales
ROW_E4M3 = "E4M3"  # format of Engram rows: E4M3 values, then an E8M0 scale for each 32 of them


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
class ExpertLayout:
    """What an expert of one layer is made of, and where that stands in a slot."""

    pieces: tuple[ExpectedTensor, ...]  # dtype and shape, parallel to PIECES; (0,) for an empty one
    image: SlotImage

    @classmethod
    def of_pieces(cls, pieces: Sequence[ExpectedTensor]) -> ExpertLayout:
        """Place pieces of these dtypes and shapes; a block format's shape counts values."""
        sizes = tuple(piece_bytes(piece.dtype, piece.shape) for piece in pieces)
        return cls(tuple(pieces), SlotImage.of_pieces(sizes))

    @property
    def formats(self) -> tuple[str, str, str]:
        """Format of gate, up and down: "FP4", or a GGUF block type such as "Q2_K"."""
        gate, up, down = (
            FP4 if self.image.piece_bytes[number + 1] else self.pieces[number].dtype
            for number in (0, 2, 4)
        )
        return gate, up, down

    @property
    def format(self) -> str:
        """The formats as one name: "FP4", "Q2_K/Q3_K" (gate and up, down), "Q2_K/Q4_K/Q3_K"."""
        gate, up, down = self.formats
        if gate != up:
            return f"{gate}/{up}/{down}"
        return gate if gate == down else f"{gate}/{down}"


def piece_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a safetensors dtype or a GGUF block type; ValueError on part of a block.

    The shape counts values, but for safetensors dtypes that pack several into one element.
    """
    if dtype in DTYPE_BITS:
        return dtype_bytes(dtype, shape)
    block = BLOCK_TYPE_OF_NAME[dtype]
    if shape and shape[-1] % block.n_values:
        raise ValueError(f"{dtype}: a row is a multiple of {block.n_values} values, got {shape}")
    return math.prod(shape) // block.n_values * block.n_bytes


@dataclass(frozen=True, slots=True)
class Slice:
    """Bytes at `offset` of the shard that go to `slot_offset` of a slot: a piece, or a RECORD."""

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
    """One Engram table: row r lies at values.offset + r * value_bytes, its scales alike.

    `format` says what a row's bytes are, values and scales together: ROW_E4M3 or a block type.
    """

    index: int
    layer: int
    n_rows: int
    values: ByteRange
    scales: ByteRange
    value_bytes: int
    scale_bytes: int
    format: str = ROW_E4M3

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the ring: values, then scales."""
        return self.value_bytes + self.scale_bytes


class SliceMap:
    """Key to slices, kept as two arrays: 1.1 MB for the real model's 92,160 slices.

    `image` is the largest layer's; `layouts` has each layer's own.
    """

    def __init__(
        self,
        config: ModelConfig,
        layouts: tuple[ExpertLayout, ...],  # one a layer
        shards: tuple[Shard, ...],
        shard_numbers: NDArray[np.int32],  # [n_layers, n_experts, 6], position in `shards`
        offsets: NDArray[np.int64],  # [n_layers, n_experts, 6], from the start of the file
    ) -> None:
        self.config = config
        self.layouts = layouts
        self.image = max((layout.image for layout in layouts), key=lambda image: image.slot_bytes)
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
        # By the shard's id: to hash a path 90,000 times takes longer than all else here.
        used = {id(row.shard): row.shard for row in rows}
        by_id = {key: number_of[shard.path] for key, shard in used.items()}
        numbers = np.array([by_id[id(row.shard)] for row in rows], np.int32).reshape(size)
        offsets = np.array([row.offset for row in rows], np.int64).reshape(size)
        numbers.flags.writeable = False
        offsets.flags.writeable = False
        layout = ExpertLayout.of_pieces(expert_pieces(config))
        return cls(config, (layout,) * config.n_layers, shards, numbers, offsets)

    def slices(self, layer: int, expert: int) -> tuple[Slice, ...]:
        """Return what fills a slot with one expert: its pieces in the order of PIECES.

        Empty pieces are left out. Of an expert pack it is one RECORD, or one's parts on several
        drives. Raises ValueError on a layer or expert that the model does not have.
        """
        self._check_key(layer, expert)
        numbers = self.shard_numbers[layer, expert].tolist()
        offsets = self.offsets[layer, expert].tolist()
        layout = self.layouts[layer]
        image = layout.image
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
            for number, piece in enumerate(layout.pieces)
            if image.piece_bytes[number]
        )

    def n_copies(self, layer: int) -> int:
        """Return how often a layer's experts are there: 0 in a share without, 2 with a mirror."""
        self._check_key(layer, 0)
        return 1

    def mirror_slices(self, layer: int, expert: int) -> tuple[Slice, ...]:
        """Return another place of the same bytes, () where there is none."""
        self._check_key(layer, expert)
        return ()

    def _check_key(self, layer: int, expert: int) -> None:
        config = self.config
        if not (0 <= layer < config.n_layers and 0 <= expert < config.n_experts):
            raise ValueError(
                f"layer {layer} expert {expert}: the model has {config.n_layers} layers "
                f"of {config.n_experts} experts"
            )


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
