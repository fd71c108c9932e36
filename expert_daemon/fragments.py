"""Where an expert's bytes are and where they belong, from a checkpoint, as the readers want it."""

from __future__ import annotations

from collections.abc import Callable

from protocol.files.checkpoint import Checkpoint
from protocol.files.safetensors_index import Shard
from protocol.files.slice_map import Slice

from .read_plan import Fragment
from .reader import Key


def expert_fragments(checkpoint: Checkpoint) -> Callable[[Key], list[Fragment]]:
    """Return a function from a key to its fragments, shards numbered as in the checkpoint."""
    numbers = {shard: number for number, shard in enumerate(checkpoint.shards)}

    def fragments(key: Key) -> list[Fragment]:
        return [_fragment(numbers, piece) for piece in checkpoint.slice_map.slices(*key)]

    return fragments


def mirror_fragments(checkpoint: Checkpoint) -> Callable[[Key], list[Fragment]]:
    """Return a function from a key to its fragments in the mirror, none where there is none."""
    numbers = {shard: number for number, shard in enumerate(checkpoint.shards)}

    def fragments(key: Key) -> list[Fragment]:
        slices = checkpoint.slice_map.mirror_slices(*key)
        return [_fragment(numbers, piece) for piece in slices]

    return fragments


def slot_pieces(checkpoint: Checkpoint) -> list[tuple[tuple[int, int], ...]]:
    """Return each layer's pieces in a slot: (offset, bytes)."""
    images = [layout.image for layout in checkpoint.slice_map.layouts]
    return [tuple(zip(image.piece_offsets, image.piece_bytes, strict=True)) for image in images]


def _fragment(numbers: dict[Shard, int], piece: Slice) -> Fragment:
    return Fragment(numbers[piece.shard], piece.offset, piece.n_bytes, piece.slot_offset)
