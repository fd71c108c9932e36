"""Where an expert's bytes are and where they belong, from a checkpoint, as the readers want it."""

from __future__ import annotations

from collections.abc import Callable

from protocol.files.checkpoint import Checkpoint
from protocol.files.slice_map import Slice

from .read_plan import Fragment
from .reader import Key


def expert_fragments(checkpoint: Checkpoint) -> Callable[[Key], list[Fragment]]:
    """Return a function from a key to its fragments, shards numbered as in the checkpoint."""
    numbers = {shard: number for number, shard in enumerate(checkpoint.shards)}

    def fragment(piece: Slice) -> Fragment:
        return Fragment(numbers[piece.shard], piece.offset, piece.n_bytes, piece.slot_offset)

    def fragments(key: Key) -> list[Fragment]:
        return [fragment(piece) for piece in checkpoint.slice_map.slices(*key)]

    return fragments


def slot_pieces(checkpoint: Checkpoint) -> list[tuple[tuple[int, int], ...]]:
    """Return each layer's pieces in a slot: (offset, bytes)."""
    images = [layout.image for layout in checkpoint.slice_map.layouts]
    return [tuple(zip(image.piece_offsets, image.piece_bytes, strict=True)) for image in images]
