"""An expert's matrices as torch views of its arena slot.

Owns no memory: the views stand on the client's read-only mapping and are made once a slot. What a
view shows may change when a write window opens, so it is used only for the layer that asked.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compute.model.sources import ExpertMatrices
from protocol.arena.layout import PIECES, ArenaView
from protocol.errors import ProtocolError

Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class PieceShapes:
    """Where the pieces of a layer's experts stand in a slot; tuples are parallel to PIECES."""

    offsets: tuple[int, ...]
    shapes: tuple[Shape, ...]  # (out, bytes a row); (0, 0) of an empty piece

    @property
    def n_bytes(self) -> tuple[int, ...]:
        """Bytes of each piece."""
        return tuple(out * row for out, row in self.shapes)


class ExpertViews:
    """`matrices(layer, slot)` gives an expert as u8 tensors [out, bytes], in the order of PIECES.

    arena    the mapping, which must outlive the views
    shapes   one entry a layer, the same object for layers alike
    device   where the tensors are: views on the CPU, elsewhere the slot is copied each time
    """

    def __init__(
        self, arena: ArenaView, shapes: Sequence[PieceShapes], device: torch.device | None = None
    ) -> None:
        layout = arena.layout
        _check(layout.piece_bytes, shapes)
        self._shapes = shapes
        self._device = device if device is not None and device.type != "cpu" else None
        self._layout = layout
        self._slots = slots_tensor(arena)
        self._cuda_stream: torch.cuda.Stream | None = None
        self._made: list[tuple[PieceShapes, ExpertMatrices] | None] = [None] * layout.n_slots_max

    @property
    def copies(self) -> bool:
        """Whether `matrices` copies what it returns."""
        return self._device is not None

    def matrices(self, layer: int, slot: int) -> ExpertMatrices:
        """Return the matrices that stand in `slot` now, which holds an expert of `layer`."""
        shapes = self._shapes[layer]
        if self._device is not None:
            return pieces_of(self._copied(slot, self._device), shapes)
        made = self._made[slot]
        if made is None or made[0] is not shapes:
            made = self._made[slot] = (shapes, pieces_of(self._bytes(slot), shapes))
        return made[1]

    def _copied(self, slot: int, device: torch.device) -> Tensor:
        """Return a copy on the device: complete, since the slot may be overwritten afterwards.

        A CUDA stream of its own makes it, so that waiting for it is not waiting for what the
        device computes.
        """
        if device.type != "cuda":
            return self._bytes(slot).to(device)
        if self._cuda_stream is None:
            self._cuda_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._cuda_stream):
            there = self._bytes(slot).to(device, non_blocking=True)
        self._cuda_stream.synchronize()
        # Its memory is the copying stream's: not to be given out while the other one reads it.
        there.record_stream(torch.cuda.current_stream(device))
        return there

    def _bytes(self, slot: int) -> Tensor:
        rooms = self._layout.rooms
        start = rooms.end(slot)
        return self._slots[start : start + rooms.size(slot)]


def _check(arena_bytes: tuple[int, ...], shapes: Sequence[PieceShapes]) -> None:
    """Refuse an arena whose slots are not made for the model's largest expert."""
    if any(layer.n_bytes == arena_bytes for layer in shapes):
        return
    for name, found, wanted in zip(PIECES, arena_bytes, shapes[0].n_bytes, strict=True):
        if found != wanted:
            raise ProtocolError(
                f"arena: piece {name} has {found} bytes a slot, the model's has {wanted}"
            )


def pieces_of(slot: Tensor, shapes: PieceShapes) -> ExpertMatrices:
    """Return the matrices whose bytes stand in a slot [slot_bytes] u8."""
    pieces = zip(shapes.offsets, shapes.shapes, strict=True)
    return ExpertMatrices(
        *(slot[offset : offset + out * row].view(out, row) for offset, (out, row) in pieces)
    )


def slots_tensor(arena: ArenaView) -> Tensor:
    """Return the bytes of all slots as one u8 tensor over the mapping."""
    layout = arena.layout
    with warnings.catch_warnings():
        # The mapping is read-only on purpose, and nothing here writes to the tensor.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(
            arena.memory,
            dtype=torch.uint8,
            offset=layout.slots_offset,
            count=layout.size("slots"),
        )
