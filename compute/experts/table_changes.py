"""Slot changes on their way into the device's table, by recorded launches.

After a miss the host has slept, and each call into the driver costs it several times as much as in
a loop: so a change is one replay of a graph. The kernel reads page-locked memory itself: a copy
would queue behind those of experts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.update_slots import update_slots

_LOG = logging.getLogger("headrace.compute")
N_TRIPLES = 64  # in a room
N_ROOMS = 16  # changes on their way at a time, of a token's segments most; a further one waits
_NO_CHANGE = -1  # a layer that is none
_ANY_SLOT = 2**31 - 1  # the caller has looked at them

Triples = Sequence[tuple[int, int, int]]  # (layer, expert, slot of the table or -1)


class TableChanges:
    """Applies triples to a device's table [n_layers, n_experts] i32 on its current CUDA stream."""

    def __init__(self, table: Tensor) -> None:
        self._table = table
        self._rooms: list[_Room] = []
        self._next = 0

    def apply(self, triples: Triples) -> None:
        """Launch the changes, all of them in range and each key once."""
        if not self._table.is_cuda:
            update_slots(self._table, torch.tensor(triples, dtype=torch.int32), _ANY_SLOT)
            return
        if not self._rooms:
            self._rooms = [_Room(self._table) for _ in range(N_ROOMS)]
        for first in range(0, len(triples), N_TRIPLES):
            self._rooms[self._next].apply(triples[first : first + N_TRIPLES])
            self._next = (self._next + 1) % N_ROOMS


class _Room:
    """Page-locked memory for some triples, and the launch that reads it."""

    def __init__(self, table: Tensor) -> None:
        self._table = table
        self._triples = torch.full((N_TRIPLES, 3), _NO_CHANGE, dtype=torch.int32, pin_memory=True)
        self._rows = self._triples.numpy()
        self._used = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._launch = self._recorded()

    def apply(self, triples: Triples) -> None:
        """Launch these, once what was here before has been used."""
        self._used.synchronize()  # one never recorded has nothing to wait for
        self._rows[: len(triples)] = triples
        self._rows[len(triples) :] = _NO_CHANGE
        self._launch()
        self._used.record()

    def _at_once(self) -> None:
        update_slots(self._table, self._triples, _ANY_SLOT)

    def _recorded(self) -> Callable[[], None]:
        self._at_once()  # compiles the kernel, changes nothing
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self._table.device)  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._at_once()
                finally:
                    graph.capture_end()
        except (RuntimeError, torch.AcceleratorError) as error:
            _LOG.warning("slot changes go by single launches: %s", str(error).splitlines()[0])
            return self._at_once
        return graph.replay
