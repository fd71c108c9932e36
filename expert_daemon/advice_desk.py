"""Advice of clients: keys to have ready when idle, and what an engine foresees."""

from __future__ import annotations

import numpy as np

from protocol.wire.messages import Hint, Warm

from .arena import Arena
from .log import log
from .sessions import Session
from .works import Works


class AdviceDesk:
    """Hands advice to the cache. Nothing is answered: Stats tells what became of it."""

    def __init__(self, works: Works) -> None:
        self._cache = works.loading.cache
        self._reader = works.reader
        self._arena: Arena = works.arena
        self._size = works.size
        self._said_ended = False

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
        pairs = np.frombuffer(message.keys, "<u2").reshape(-1, 2)[:n_room].tolist()
        keys = [(layer, expert) for layer, expert in pairs]
        self._cache.warm(sorted(keys, key=self._reader.order))
