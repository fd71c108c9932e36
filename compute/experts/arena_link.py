"""The engine's hold on the daemon's arena: the host's slot table, kept true, and the wait for a
daemon that is lost.

Invariants: the table's retirements are taken where nothing reads the arena, and then acknowledged,
as is what a resize asks for; after DaemonLost nothing in the arena is read before the whole table
has come again. One thread uses it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.errors import DaemonBusy, DaemonLost, HeadraceError
from protocol.wire.client import ExpertClient
from protocol.wire.messages import Added, Drop

from .arena_view import ExpertViews, PieceShapes
from .request_io import IoCounters, RequestCancelled, Waiting
from .slot_table import SlotTable

_LOG = logging.getLogger("headrace.compute")
_IDLE_ACK_S = 0.04  # the daemon counts on an Ack within 50 ms
_RETRY_S = 0.02
_HELLO_MS = 250  # short, so that a child that died is soon seen


class ArenaLink:
    """An `ExpertClient` in the engine's role, with the table and the views of its arena.

    client   connected; stays the caller's to close
    shapes   of the experts' pieces, one entry a layer, see ExpertViews
    """

    def __init__(
        self,
        client: ExpertClient,
        shapes: Sequence[PieceShapes],
        waiting: Waiting | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.io = IoCounters()
        self.waiting = waiting or Waiting()
        self.n_daemons_lost = 0
        self.client = client
        self._shapes = shapes
        self._device = device
        self._table = SlotTable()
        self._acked = -1
        self._resizes: list[Drop | Added] = []  # arrived, not done yet
        self._arena_id = b""
        self._lost_since: float | None = None  # None: answered since
        self._attach()

    # what is told and taken between requests

    @staticmethod
    @contextmanager
    def _if_there(when: str) -> Iterator[None]:
        """Do without a daemon that is lost meanwhile: the next request finds out and recovers."""
        try:
            yield
        except DaemonLost as lost:
            _LOG.debug("%s: %s", when, lost)

    def _touch(self, step: int, picks: NDArray[np.uint16]) -> None:
        """Tell a step's picks [n, 2], layers and experts. A lost daemon is not told."""
        with self._if_there(f"after step {step}"):
            if len(picks):
                self.client.touch(step, picks)

    def take_changes(self) -> None:
        """Apply the daemon's retirements, do what a resize asks for, acknowledge both.

        Only where nothing reads the arena.

        Raises DaemonLost.
        """
        self._take_new()
        self.acknowledge()

    def _take_new(self) -> bool:
        """Apply what has come; whether anything had."""
        arrived = self.client.changes()
        self._resizes += self.client.memory_changes()
        if not arrived and not self._resizes:
            return False
        self._stop_reading()
        for changes in arrived:  # a table that must be asked for may not come: resizes are kept
            self._apply(changes.from_version, changes.to_version, changes.changes)
        while self._resizes:
            resized = self._resizes.pop(0)
            self._resized(resized)
            if isinstance(resized, Drop):
                self.client.dropped(resized)
            else:
                self.client.added(resized)
                self._acked = -1
        return True

    def acknowledge(self) -> None:
        """Say what is applied, unless that was said: nothing reads by an older table any more.

        Raises DaemonLost.
        """
        if self._table.version != self._acked:
            self.client.ack(self._table.version)
            self._acked = self._table.version

    def _stop_reading(self) -> None:
        """Nothing: no copy is ever unfinished here."""

    def _resized(self, resized: Drop | Added) -> None:
        """Nothing: on the CPU slots need no registering."""

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Go on acknowledging while the block waits for something else, such as a person.

        A thread of our own uses the client meanwhile; nothing else may.
        """
        ended = threading.Event()

        def acknowledge() -> None:
            while not ended.wait(_IDLE_ACK_S):
                try:
                    self.take_changes()
                except DaemonLost:
                    return  # the next request finds out and recovers

        thread = threading.Thread(target=acknowledge, name="idle-ack", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def check_cancelled(self) -> None:
        """Raise RequestCancelled once the request's owner has given up."""
        if self.waiting.cancelled():
            raise RequestCancelled

    # the table, and a daemon that is lost

    def _forget_requests(self) -> None:
        """Nothing: no request stays open between calls here."""

    def _apply(
        self, from_version: int, to_version: int, changes: Sequence[tuple[int, int, int]]
    ) -> bool:
        """Apply changes; False where there was a gap, and the whole table was taken instead."""
        continues = self._table.apply(from_version, to_version, changes)
        if not continues:
            _LOG.info("table at %d, changes from %d: resync", self._table.version, from_version)
            self._table.reset(self.client.resync())
        self.client.applied = self._table.version
        return continues

    def _attach(self) -> None:
        """Take the arena and the table that the last Welcome named."""
        welcome = self.client.welcome
        if welcome.arena_id != self._arena_id:
            self._views = ExpertViews(self.client.arena, self._shapes, self._device)
            self._arena_id = welcome.arena_id
        self._table.reset(welcome)
        self._resizes.clear()
        self.client.applied = self._table.version
        self._acked = -1
        self.waiting.attached(self.client)

    def recover_if_lost(self) -> None:
        """Before anything reads the arena: wait for a daemon that is known to be lost.

        Who found that out had nothing to ask of it, or gave up waiting. Raises as `_recover` does.
        """
        if self.client.lost:
            self._recover(DaemonLost(f"the daemon {self.client.lost}"))

    def _recover(self, lost: HeadraceError) -> None:
        """Wait for the daemon's return, then take the whole table again.

        Raises DaemonLost when nothing was answered for `daemon_wait_s`, also by a daemon that
        returns again and again without answering; and RequestCancelled.
        """
        try:
            self._await_return(lost)
        except BaseException:
            self._lost_since = None  # whoever asks next waits anew
            raise

    def _await_return(self, lost: HeadraceError) -> None:
        self.n_daemons_lost += 1
        self._table.clear()
        self._forget_requests()
        _LOG.warning("%s; waiting for its return", lost)
        wait_s = self.waiting.daemon_wait_s
        if self._lost_since is None:
            self._lost_since = time.monotonic()
        while True:
            self.check_cancelled()
            self.waiting.tend()
            if time.monotonic() > self._lost_since + wait_s:
                raise DaemonLost(f"{lost}; waited {wait_s:g} s for its return") from lost
            try:
                self.client.reconnect(timeout_ms=_HELLO_MS)
                break
            except (DaemonLost, DaemonBusy) as error:
                lost = error
            time.sleep(_RETRY_S)
        self._attach()
        _LOG.warning("the expert daemon is back, generation %d", self.client.welcome.generation)

    @contextmanager
    def _stall(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.io.stall_ms += 1000 * (time.perf_counter() - started)
