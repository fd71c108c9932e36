"""An expert's matrices as torch views of its arena slot.

Owns no memory: the views stand on the client's read-only mapping and are made once a slot. What a
view shows may change when a write window opens, so it is used only for the layer that asked.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from compute.model.sources import ExpertMatrices
from protocol.arena.layout import PIECES, ArenaView
from protocol.errors import ProtocolError

Shape = tuple[int, int]


class ExpertViews:
    """`matrices(slot)` gives one expert as u8 tensors [out, bytes], in the order of PIECES.

    arena    the mapping, which must outlive the views
    shapes   (out, bytes a row) of each piece, as in PIECES
    device   where the tensors are: views on the CPU, elsewhere the slot is copied each time
    """

    def __init__(
        self, arena: ArenaView, shapes: tuple[Shape, ...], device: torch.device | None = None
    ) -> None:
        layout = arena.layout
        for name, shape, n_bytes in zip(PIECES, shapes, layout.piece_bytes, strict=True):
            if shape[0] * shape[1] != n_bytes:
                raise ProtocolError(
                    f"arena: piece {name} has {n_bytes} bytes a slot, the model's is {shape}"
                )
        self._shapes = shapes
        self._offsets = layout.piece_offsets
        self._device = device if device is not None and device.type != "cpu" else None
        self._slots = _slots_tensor(arena)
        self._made: list[ExpertMatrices | None] = [None] * layout.n_slots_max

    def matrices(self, slot: int) -> ExpertMatrices:
        """Return the matrices that stand in `slot` now."""
        if self._device is not None:
            return self._pieces(self._slots[slot].to(self._device))
        made = self._made[slot]
        if made is None:
            made = self._made[slot] = self._pieces(self._slots[slot])
        return made

    def _pieces(self, slot: Tensor) -> ExpertMatrices:
        pieces = zip(self._offsets, self._shapes, strict=True)
        return ExpertMatrices(
            *(slot[offset : offset + out * row].view(out, row) for offset, (out, row) in pieces)
        )


def _slots_tensor(arena: ArenaView) -> Tensor:
    """All slots as one u8 tensor [n_slots_max, slot_bytes] over the mapping."""
    layout = arena.layout
    with warnings.catch_warnings():
        # The mapping is read-only on purpose, and nothing here writes to the tensor.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        flat = torch.frombuffer(
            arena.memory,
            dtype=torch.uint8,
            offset=layout.slots_offset,
            count=layout.n_slots_max * layout.slot_bytes,
        )
    return flat.view(layout.n_slots_max, layout.slot_bytes)
