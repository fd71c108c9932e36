"""Slot changes on their way to the device, through page-locked rooms that are used in turn.

Page-locking memory anew for every change would take the host longer than all the rest of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

N_TRIPLES = 64  # in a room
N_ROOMS = 4


class StagedTriples:
    """Brings triples [n, 3] i32 to a device on its current stream, as a rule without a wait."""

    def __init__(self, device: torch.device) -> None:
        self._rooms = [_Room(device) for _ in range(N_ROOMS)] if device.type == "cuda" else []
        self._next = 0

    def on_device(self, triples: Sequence[tuple[int, int, int]]) -> Iterator[Tensor]:
        """Yield the triples in tensors on the device; each is to be used before the next is asked
        for, on the current stream.
        """
        if not self._rooms:
            yield torch.tensor(triples, dtype=torch.int32)
            return
        for first in range(0, len(triples), N_TRIPLES):
            room = self._rooms[self._next]
            self._next = (self._next + 1) % N_ROOMS
            yield room.take(triples[first : first + N_TRIPLES])
            room.used.record()


class _Room:
    """Memory for some triples on the host and on the device."""

    def __init__(self, device: torch.device) -> None:
        shape = (N_TRIPLES, 3)
        self._host = torch.empty(shape, dtype=torch.int32, pin_memory=True)
        self._device = torch.empty(shape, dtype=torch.int32, device=device)
        self.used = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def take(self, triples: Sequence[tuple[int, int, int]]) -> Tensor:
        """Return the triples on the device, once what was here before has been used."""
        self.used.synchronize()  # one never recorded has nothing to wait for
        n = len(triples)
        self._host.numpy()[:n] = triples
        found = self._device[:n]
        found.copy_(self._host[:n], non_blocking=True)
        return found
