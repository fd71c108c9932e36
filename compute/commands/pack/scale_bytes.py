"""Scale bytes on their way into a pack: 255 is no E8M0 number, whatever holds it is refused.

One look at the largest byte of what is copied anyway, a small share of the copy.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import ShardError
from protocol.files.slice_map import FP4, ExpertLayout
from protocol.files.tensor_table import expert_piece_names, tensor_label

from .part_file import Bytes

NOT_A_NUMBER = 255
MXFP4, MXFP4_BLOCK_BYTES = "MXFP4", 17  # the scale is a block's first byte


@dataclass(frozen=True, slots=True)
class Scales:
    """Where a tensor keeps E8M0 scales: every `step`-th byte, so many a row."""

    name: str
    step: int
    row_scales: int

    @classmethod
    def of(cls, name: str, dtype: str, shape: tuple[int, ...]) -> Scales | None:
        """Return those of a tensor, None where its bytes are something else."""
        if not shape or not shape[-1]:
            return None
        if dtype == MXFP4:
            return cls(name, MXFP4_BLOCK_BYTES, max(1, shape[-1] // 32))
        return cls(name, 1, shape[-1]) if dtype == "F8_E8M0" else None

    def check(self, data: Bytes, start: int = 0) -> None:
        """Look at a tensor's bytes from byte `start` on; raises ShardError naming row and block."""
        first = -start % self.step
        found = data[first :: self.step]
        if not len(found) or int(found.max()) != NOT_A_NUMBER:
            return
        number = (start + first) // self.step + int(found.argmax())
        row, block = divmod(number, self.row_scales)
        raise ShardError(
            f"{tensor_label(self.name)}: row {row}, block {block}: scale byte {NOT_A_NUMBER} is "
            "not a number"
        )


def check_slot(layer: int, expert: int, layout: ExpertLayout, slot: Bytes) -> None:
    """Look at an expert's scales in a slot; raises ShardError naming tensor, row and block."""
    names, image = expert_piece_names(layer, expert), layout.image
    for number, name in enumerate(layout.formats):
        piece = 2 * number + (name == FP4)  # the scales' own piece, or the blocks
        scales = Scales.of(names[piece], layout.pieces[piece].dtype, layout.pieces[piece].shape)
        if scales is not None:
            start = image.piece_offsets[piece]
            scales.check(slot[start : start + image.piece_bytes[piece]])
