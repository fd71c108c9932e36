"""Advice of clients: keys to have ready when idle, and what an engine foresees.

Runs on the loop's thread. However many keys are to be warm, one call sees to some of them, and the
loop comes back to the others after what else there is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from protocol.wire.messages import Hint, Warm

from .file_order import FileOrder
from .log import log
from .outbox import Outbox
from .sessions import Session
from .works import Works

MOST_LOOKED_UP = 64  # keys whose place in the files one call looks up

NONE: NDArray[np.int64] = np.zeros(0, np.int64)


class AdviceDesk:
    """Hands advice to the cache. Nothing is answered: Stats tells what became of it."""

    def __init__(
        self,
        outbox: Outbox,
        works: Works,
        loop: asyncio.AbstractEventLoop,
        settle: Callable[[], None],
    ) -> None:
        self._outbox = outbox
        self._cache = works.loading.cache
        self._size = works.size
        self._loop = loop
        self._settle = settle
        n_layers, n_experts = works.arena.view.table.shape
        self._n_experts: int = n_experts
        self._order = FileOrder(works.reader.order, n_layers, n_experts)
        self._unsorted = NONE  # flat keys to be warm that the cache was not told of yet
        self._comes_back = False  # the loop does
        self._said_ended = False

    @property
    def n_warm_left(self) -> int:
        """Keys of the last Warm that are still to be looked at."""
        return len(self._unsorted) + self._cache.n_warm_left

    def hint(self, _session: Session, message: Hint) -> None:
        """Note what a layer may want in this step; read it if hints are followed."""
        self._cache.hint(message.step, [(message.layer, expert) for expert in message.experts])
        if self._cache.hints_ended and not self._said_ended:
            self._said_ended = True
            log("fewer than half of the hints were of use: they are followed no more")
        elif not self._cache.hints_ended:
            self._said_ended = False

    def warm(self, _session: Session, message: Warm) -> None:
        """Load keys when idle, the hottest that there is room for, in the order of the files."""
        budget = self._size.budget
        n_room = max(0, self._cache.n_slots - budget.free_pool - budget.hedge)
        pairs = np.frombuffer(message.keys, "<u2").reshape(-1, 2)[:n_room].astype(np.int64)
        self._replace(pairs[:, 0] * self._n_experts + pairs[:, 1])

    def warm_displaced(self) -> None:
        """Have read again, when idle, what a smaller arena lost and has room for."""
        lost = self._cache.take_displaced()
        if lost and not self.n_warm_left:
            flat = [layer * self._n_experts + expert for layer, expert in lost]
            self._replace(np.array(flat[: self._cache.n_slots], np.int64))

    def _replace(self, keys: NDArray[np.int64]) -> None:
        self._cache.warm(())
        self._unsorted = keys

    def advance(self) -> None:
        """Have the loop come back where there is more to do; call it after every event."""
        if not self._comes_back and (len(self._unsorted) or self._cache.is_cut_short):
            self._comes_back = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._comes_back = False
        if not len(self._unsorted):
            self._cache.go_on()
        elif self._order.learn(self._unsorted, MOST_LOOKED_UP):
            keys, self._unsorted = self._order.sorted(self._unsorted), NONE
            self._cache.warm(keys)
        self._settle()
        self._outbox.look_again()
