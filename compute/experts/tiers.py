"""Where experts lie, as the device sees it: one table over the device cache and the arena.

Owns the device's slot table, the addresses of all slots and the memory of the device cache.
Invariants: the device's table is derived, never edited: the device slot of a key, else `n_device`
+ its arena slot, else -1; it changes between launches alone, on the CUDA stream that launches, and
only by the triples that `push` takes; `host_table` and `host_addresses` are what the next launch
finds. Source: DESIGN.md, section 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.formats.fp4_expert import Fp4Shape
from kernels.formats.k_expert import BlockShape
from kernels.routed_m1_blocks import check_blocks
from kernels.update_slots import unique_triples
from protocol.errors import ConfigError
from protocol.files.slice_map import FP4

from .arena_view import PieceShapes
from .table_changes import TableChanges, Triples


class ExpertTiers:
    """The slot table and what it points at.

    pieces      of the experts, one entry a layer
    formats     of gate, up and down, one entry a layer
    slot_bytes  of the largest expert
    n_device    slots of the device cache
    """

    def __init__(
        self,
        pieces: Sequence[PieceShapes],
        formats: Sequence[tuple[str, str, str]],
        n_experts: int,
        slot_bytes: int,
        n_device: int,
        device: torch.device,
    ) -> None:
        self.n_device = n_device
        self.n_experts = n_experts
        self.slot_bytes = slot_bytes
        self.device = device
        self.shapes: list[Fp4Shape | BlockShape] = [
            expert_shape(piece, kinds) for piece, kinds in zip(pieces, formats, strict=True)
        ]
        self.offsets = [(p.offsets[0], p.offsets[2], p.offsets[4]) for p in pieces]
        self.table = torch.full((len(pieces), n_experts), -1, dtype=torch.int32, device=device)
        self.host_table = np.full((len(pieces), n_experts), -1, np.int32)
        self.cache = torch.empty((n_device, slot_bytes), dtype=torch.uint8, device=device)
        self.addresses = torch.zeros(0, dtype=torch.int64, device=device)
        self.host_addresses = np.zeros(0, np.int64)
        self._n_arena = 0
        self._changes = TableChanges(self.table)

    def set_arena(self, starts: NDArray[np.int64]) -> bool:
        """Take the addresses at which the arena's slots begin; whether `addresses` moved.

        The tensor stays where it is as long as the number of slots does.
        """
        own = self.cache.data_ptr() + np.arange(self.n_device, dtype=np.int64) * self.slot_bytes
        self.host_addresses = np.concatenate([own, starts])
        every = torch.from_numpy(self.host_addresses)
        self._n_arena = len(starts)
        if self.addresses.shape == every.shape:
            self.addresses.copy_(every)
            return False
        self.addresses = every.to(self.device, copy=True)
        return True

    def release(self) -> None:
        """Give the device cache's memory back; nothing is launched any more."""
        self.cache = self.cache[:0].clone()

    def entry(self, device_slot: int, arena_slot: int) -> int:
        """Return a key's entry of the table."""
        if device_slot >= 0:
            return device_slot
        return self.n_device + arena_slot if arena_slot >= 0 else -1

    def push(self, triples: Triples) -> None:
        """Change entries, the last one of a key counts. Raises ValueError on one out of range."""
        n_layers, n_slots = self.table.shape[0], self.n_device + self._n_arena
        triples = unique_triples(triples, n_layers, self.n_experts, n_slots)
        if not triples:
            return
        self._changes.apply(triples)
        for layer, expert, slot in triples:
            self.host_table[layer, expert] = slot

    def replace(self, table: NDArray[np.int32]) -> None:
        """Set the whole table [n_layers, n_experts]."""
        self.host_table[:] = table
        self.table.copy_(torch.from_numpy(self.host_table))


def expert_shape(pieces: PieceShapes, formats: tuple[str, str, str]) -> Fp4Shape | BlockShape:
    """Return what the kernel for single tokens is told of a layer's experts.

    Raises ConfigError for formats that it does not read.
    """
    width, hidden = pieces.shapes[0][0], pieces.shapes[4][0]
    if set(formats) == {FP4}:
        gate, gate_scale, up, up_scale, down, down_scale = pieces.offsets
        return Fp4Shape(hidden, width, gate_scale - gate, up_scale - up, down_scale - down)
    shape = BlockShape(hidden, width, *formats)
    try:
        check_blocks(shape)
    except ValueError as error:
        raise ConfigError(f"no kernel for experts in {', '.join(formats)}: {error}") from None
    return shape
