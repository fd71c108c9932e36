"""Experts and Engram rows read straight from a checkpoint's files, without a daemon. Tests only."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compute.model.sources import ExpertMatrices
from protocol.files.checkpoint import Checkpoint


class LocalSources:
    """An ExpertSource and a RowSource at once; every byte is kept after its first read.

    `reuse` gives all experts from one buffer, as a source with few slots does.
    """

    def __init__(self, checkpoint: Checkpoint, *, reuse: bool = False) -> None:
        self.checkpoint = checkpoint
        self.reuse = reuse
        self.asked: list[tuple[int, tuple[int, ...]]] = []
        self._experts: dict[tuple[int, int], ExpertMatrices] = {}
        self._tables = [self._read_table(t) for t in range(len(checkpoint.engram_tables))]
        self._requests: dict[int, Tensor] = {}
        self._next = 0

    def stream(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[int, ExpertMatrices]]:
        """Yield the experts of one layer in the order asked for."""
        self.asked.append((layer, tuple(experts)))
        for expert in experts:
            matrices = self._expert(layer, expert)
            if not self.reuse:
                yield expert, matrices
                continue
            buffer = ExpertMatrices(*(piece.clone() for piece in matrices))
            yield expert, buffer
            for piece in buffer:  # whoever still looks at it sees rubbish
                piece.fill_(0x55)

    def request_all(self, wanted: Sequence[tuple[int, NDArray[np.int64]]]) -> list[int]:
        """Keep the rows of each table."""
        handles = []
        for table, rows in wanted:
            self._next += 1
            self._requests[self._next] = self._tables[table][torch.from_numpy(rows)]
            handles.append(self._next)
        return handles

    def take(self, handle: int) -> Tensor:
        """Give the rows of a request, once."""
        return self._requests.pop(handle)

    def _expert(self, layer: int, expert: int) -> ExpertMatrices:
        key = (layer, expert)
        if key not in self._experts:
            slice_map = self.checkpoint.slice_map
            layout = slice_map.layouts[layer]
            slot = torch.zeros(layout.image.slot_bytes, dtype=torch.uint8)
            for part in slice_map.slices(layer, expert):
                read = _read(part.shard.path, part.offset, part.n_bytes)
                slot[part.slot_offset : part.slot_offset + part.n_bytes] = read
            image = layout.image
            places = zip(layout.pieces, image.piece_offsets, image.piece_bytes, strict=True)
            self._experts[key] = ExpertMatrices(
                *(slot[at : at + n].view(piece.shape[0], -1 if n else 0) for piece, at, n in places)
            )
        return self._experts[key]

    def _read_table(self, table: int) -> Tensor:
        entry = self.checkpoint.engram_tables[table]
        columns = [(entry.values, entry.value_bytes), (entry.scales, entry.scale_bytes)]
        parts = [
            _read(part.shard.path, part.offset, part.n_bytes).view(entry.n_rows, width)
            for part, width in columns
            if width
        ]
        return torch.cat(parts, dim=1)


def _read(path: Path, offset: int, n_bytes: int) -> Tensor:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return torch.frombuffer(bytearray(os.pread(descriptor, n_bytes, offset)), dtype=torch.uint8)
    finally:
        os.close(descriptor)
