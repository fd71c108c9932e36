"""One expert from the source into a record: read into its slot image, converted where need be."""

from __future__ import annotations

from collections.abc import Callable

from protocol.errors import ShardError
from protocol.files.checkpoint import Checkpoint
from protocol.files.slice_map import ExpertLayout, SlotImage

from .outputs import FillRecord
from .part_file import Bytes
from .plan import PackPlan
from .scale_bytes import check_slot
from .source_files import Scratch, SourceReader

# Fills the target slot from the source slot: (source layout, slot, target layout, slot).
Convert = Callable[[ExpertLayout, Bytes, ExpertLayout, Bytes], None]


def needs_conversion(plan: PackPlan) -> bool:
    """Whether any layer's format differs from the source's; without it torch is not imported."""
    sources = plan.checkpoint.slice_map.layouts
    return any(sources[layer] != plan.layouts[layer] for layer in plan.layers)


def record_filler(plan: PackPlan, reader: SourceReader, convert: Convert | None) -> FillRecord:
    """Return what leaves one expert's record in `scratch.target`, padding zero."""
    checkpoint = plan.checkpoint

    def fill(layer: int, expert: int, scratch: Scratch) -> None:
        source, target = checkpoint.slice_map.layouts[layer], plan.layouts[layer]
        record = scratch.target[: target.image.slot_bytes]
        clear_padding(target.image, record)
        if source == target:
            _read_slot(checkpoint, reader, (layer, expert), record, scratch.bounce)
            check_slot(layer, expert, source, record)
            return
        assert convert is not None
        slot = scratch.source[: source.image.slot_bytes]
        _read_slot(checkpoint, reader, (layer, expert), slot, scratch.bounce)
        check_slot(layer, expert, source, slot)
        try:
            convert(source, slot, target, record)
        except ValueError as error:
            raise ShardError(f"layer {layer} expert {expert}: {error}") from error

    return fill


def clear_padding(image: SlotImage, slot: Bytes) -> None:
    """Set to zero what is between and after the pieces."""
    end = 0
    for offset, n_bytes in zip(image.piece_offsets, image.piece_bytes, strict=True):
        slot[end:offset] = 0
        end = offset + n_bytes
    slot[end:] = 0


def _read_slot(
    checkpoint: Checkpoint, reader: SourceReader, key: tuple[int, int], slot: Bytes, bounce: Bytes
) -> None:
    fragments = [
        reader.fragment(part.shard, part.offset, part.n_bytes, part.slot_offset)
        for part in checkpoint.slice_map.slices(*key)
    ]
    reader.read(fragments, slot, bounce)
