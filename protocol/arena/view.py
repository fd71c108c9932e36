"""Numpy views of a mapped arena's sections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ConfigError

from .plan import HEADER, N_EPOCH_WORDS, PIECES, ArenaLayout


class ArenaView:
    """Numpy views of every section of a mapped arena.

    memory         the whole arena: an mmap, bytearray or memoryview; read-only makes the views so
    layout         its layout, as its identity page states it
    engine_memory  the engine's pages mapped writable, where `memory` is read-only

    epochs          u64 [512], the engine's: applied, epoch done, epoch launched, then zeros
    tier            u8 [n_layers, n_experts], the engine's advice
    table_sequence  u64 [1], odd while the table is being written
    table_version   u64 [1]
    table           i32 [n_layers, n_experts], arena slot or -1
    headers         HEADER [n_slots_max]
    policy          u8, the daemon's own
    verified        u8, one bit a key
    counters        u64 [512]
    pieces          u64 [n_layers, 2, 6], offsets and bytes of a layer's pieces where they differ
                    from the layout's, else zeros
    ring            u8 [ring_rows, row_bytes]
    """

    def __init__(self, memory: Any, layout: ArenaLayout, engine_memory: Any = None) -> None:
        self.memory = memoryview(memory).cast("B")
        self.layout = layout
        if self.memory.nbytes < layout.n_bytes:
            raise ConfigError(
                f"arena: {self.memory.nbytes} bytes are mapped, its layout has {layout.n_bytes}"
            )
        shape = (layout.n_layers, layout.n_experts)
        self.identity = self._array("identity", np.uint8)
        self._view_engine_pages(engine_memory, shape)
        lock = self._array("table_lock", np.dtype("<u8"))
        self.table_sequence = lock[0:1]
        self.table_version = lock[1:2]
        self.table: NDArray[np.int32] = self._array("table", np.dtype("<i4")).reshape(shape)
        self.headers = self._array("headers", HEADER)
        self.policy = self._array("policy", np.uint8)
        self.verified = self._array("verified", np.uint8)
        self.counters = self._array("counters", np.dtype("<u8"))
        pieces = self._array("pieces", np.dtype("<u8"))
        self.pieces: NDArray[np.uint64] = pieces.reshape(layout.n_layers, 2, len(PIECES))
        ring = self._array("ring", np.uint8)
        self.ring: NDArray[np.uint8] = ring.reshape(layout.ring_rows, layout.row_bytes)

    def _view_engine_pages(self, engine_memory: Any, shape: tuple[int, int]) -> None:
        begin, n_bytes = self.layout.engine_pages
        if engine_memory is None:
            pages = self.memory[begin : begin + n_bytes]
        else:
            pages = memoryview(engine_memory).cast("B")
            if pages.nbytes != n_bytes:
                raise ConfigError(f"arena: engine pages of {pages.nbytes} bytes, wanted {n_bytes}")
        self.engine_pages = pages
        self.epochs: NDArray[np.uint64] = np.frombuffer(pages, np.dtype("<u8"), N_EPOCH_WORDS)
        tier_offset = self.layout.offset("tier") - begin
        tier = np.frombuffer(pages, np.uint8, self.layout.n_keys, tier_offset)
        self.tier: NDArray[np.uint8] = tier.reshape(shape)

    def _array(self, section: str, dtype: Any) -> NDArray[Any]:
        offset, n_bytes = self.layout.offset(section), self.layout.size(section)
        dtype = np.dtype(dtype)
        return np.frombuffer(self.memory, dtype, n_bytes // dtype.itemsize, offset)

    def slot(self, slot: int) -> memoryview:
        """The slot's bytes, writable where the mapping is."""
        offset = self.layout.slot_offset(slot)
        return self.memory[offset : offset + self.layout.rooms.size(slot)]

    def piece(self, slot: int, name: str) -> memoryview:
        """One piece of PIECES of a slot, where the layer in its header has it."""
        offset, n_bytes = self._place(int(self.headers[slot]["layer"]), PIECES.index(name))
        return self.slot(slot)[offset : offset + n_bytes]

    def _place(self, layer: int, piece: int) -> tuple[int, int]:
        """(offset in a slot, bytes) of a piece: the layer's own, else the layout's."""
        if layer < self.layout.n_layers and self.pieces[layer].any():
            offset, n_bytes = self.pieces[layer, :, piece].tolist()
            return offset, n_bytes
        return self.layout.piece_offsets[piece], self.layout.piece_bytes[piece]

    @contextmanager
    def table_write(self) -> Iterator[NDArray[np.int32]]:
        """The table, its sequence lock odd until the block ends. An exception leaves it odd."""
        self.table_sequence[0] |= np.uint64(1)
        yield self.table
        self.table_sequence[0] += np.uint64(1)

    def table_snapshot(self, tries: int = 1000) -> NDArray[np.int32] | None:
        """A copy of the table that no write tore, or None where its lock stayed odd.

        For statistics: what a message has not announced is not to be consumed.
        """
        for _ in range(tries):
            before = int(self.table_sequence[0])
            if before % 2 == 0:
                copy = self.table.copy()
                if int(self.table_sequence[0]) == before:
                    return copy
        return None
