"""Experts and Engram rows from the expert daemon: the engine's side of the write windows.

Owns the host's slot table and, while a daemon is lost, the wait for its return. Invariants: a slot
is read only while no window of ours is open or by the layer that opened it; the table's retirements
are taken where nothing reads the arena, at a step's end and after a layer that streamed, and then
acknowledged, as is what a resize asks for; after DaemonLost nothing in the arena is read
before the whole table has come again; where all of a layer's experts are present, no message is
sent. One thread uses it. The device is synchronous, so no copy or kernel is ever unfinished when a
request leaves: `busy` is empty and every epoch done.
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
from torch import Tensor

from compute.model.sources import ExpertMatrices
from protocol.errors import DaemonBusy, DaemonLost, HeadraceError, ProtocolError, ShardError
from protocol.wire.client import ExpertClient
from protocol.wire.expert_stream import ExpertStream
from protocol.wire.messages import Added, Drop
from protocol.wire.reader_calls import SHARD_CODES

from .arena_view import ExpertViews, PieceShapes
from .request_io import IoCounters, RequestCancelled, Waiting
from .row_jobs import RowJob, row_jobs
from .slot_table import SlotTable

__all__ = ["IoCounters", "MissClient", "RequestCancelled", "Waiting"]

_LOG = logging.getLogger("headrace.compute")
_IDLE_ACK_S = 0.04  # the daemon counts on an Ack within 50 ms
_RETRY_S = 0.02
_HELLO_MS = 250  # short, so that a child that died is soon seen
Hints = Sequence[tuple[int, int]]  # keys that may be wanted later in the step
STREAM_WINDOW = 16  # experts that are read ahead of the one that is computed


class MissClient:
    """ExpertSource and RowSource over an `ExpertClient` in the engine's role.

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
        self._step = 0
        self._picks: list[tuple[int, Sequence[int]]] = []
        self._jobs: dict[int, tuple[RowJob, int]] = {}  # by handle, with the table's place in it
        self._next_job = 0
        self._arena_id = b""
        self._lost_since: float | None = None  # None: answered since
        self._attach()

    # ExpertSource

    def stream(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[int, ExpertMatrices]]:
        """Yield each expert's matrices, ascending; absent ones are asked for first.

        A token's picks come by one request, a chunk's more numerous ones through a stream.

        Raises RequestCancelled, ShardError for experts that cannot be read, DaemonLost when the
        daemon stays away.
        """
        self.check_cancelled()
        self.recover_if_lost()
        row = self._table.slots[layer]
        slots = [row[expert] for expert in experts]
        if not slots or min(slots) >= 0:
            self.io.hits += len(slots)
            yield from self._matrices(layer, experts, slots)
        elif len(experts) <= self.client.top_k_batch:
            yield from self._matrices(layer, experts, self._present(layer, experts))
        else:
            self.io.misses += sum(slot < 0 for slot in slots)
            self.io.hits += sum(slot >= 0 for slot in slots)
            yield from self._through_window(layer, experts)
        self._picks.append((layer, experts))

    def _matrices(
        self, layer: int, experts: Sequence[int], slots: Sequence[int]
    ) -> Iterator[tuple[int, ExpertMatrices]]:
        matrices = self._copied if self._views.copies else self._views.matrices
        for expert, slot in zip(experts, slots, strict=True):
            yield expert, matrices(layer, slot)

    def _copied(self, layer: int, slot: int) -> ExpertMatrices:
        """The matrices on the device; what it still computed before the copy counts as copying."""
        started = time.perf_counter()
        try:
            return self._views.matrices(layer, slot)
        finally:
            self.io.copy_ms += 1000 * (time.perf_counter() - started)

    def tiers(self) -> bytes:
        """Return where every expert is, a byte a key: 1 in the arena, else 0. Only for eyes."""
        return bytes(slot >= 0 for row in self._table.slots for slot in row)

    def _through_window(
        self, layer: int, experts: Sequence[int]
    ) -> Iterator[tuple[int, ExpertMatrices]]:
        """Yield each expert as it is read; what a lost daemon owed is asked for again."""
        ahead = self._expected(layer + 1, len(experts))
        n_done = 0
        while n_done < len(experts):
            self.check_cancelled()
            try:
                for expert, slot in self._named(layer, experts[n_done:], ahead):
                    yield from self._matrices(layer, [expert], [slot])
                    n_done += 1
            except DaemonLost as lost:
                self._recover(lost)
        try:
            self.take_changes()  # nothing reads the arena now
        except DaemonLost as lost:
            _LOG.debug("after layer %d: %s", layer, lost)

    def _named(
        self, layer: int, experts: Sequence[int], ahead: list[tuple[int, int]]
    ) -> Iterator[tuple[int, int]]:
        """Yield (expert, slot), ascending; once it is advanced nothing reads the slot any more."""
        unsaid = 0
        with self.client.stream(
            layer,
            experts,
            window=STREAM_WINDOW,
            step=self._step,
            ahead=ahead,
            give_up=self.waiting.cancelled,
        ) as stream:
            while not stream.ended:
                named = self._next_part(stream)
                for place, (expert, slot) in enumerate(named, 1):
                    yield expert, slot
                    unsaid += 1
                    if place == len(named) or unsaid >= STREAM_WINDOW // 4:
                        stream.consumed(expert)
                        unsaid = 0

    def _next_part(self, stream: ExpertStream) -> list[tuple[int, int]]:
        """Apply a stream's next part; return the (expert, slot) that it names."""
        with self._stall():
            part = next(stream)
        self._lost_since = None
        self.io.bytes_read += part.n_bytes
        if not self._apply(part.from_version, part.to_version, part.changes):
            stream.close()  # the whole table came: what is left is asked for again
            return []
        self.check_cancelled()  # then some may have come back as CANCELLED
        if part.errors:
            raise _error_of(part.errors)
        pairs = zip(stream.request.experts, part.slots, strict=True)
        return [(expert, slot) for expert, slot in pairs if slot >= 0]

    def _expected(self, layer: int, n_picked: int) -> list[tuple[int, int]]:
        """Absent keys of a layer that a chunk will want, where it wanted most of the last one's.

        Where the arena may hold every expert each is read but once: nothing is foreseen then.
        """
        welcome = self.client.welcome
        n_keys = welcome.n_layers * welcome.n_experts
        is_small = 4 * n_picked < 3 * welcome.n_experts
        if layer >= welcome.n_layers or is_small or welcome.n_slots >= n_keys:
            return []
        row = self._table.slots[layer]
        absent = [(layer, expert) for expert, slot in enumerate(row) if slot < 0]
        return absent[:STREAM_WINDOW]

    def _present(self, layer: int, group: Sequence[int]) -> list[int]:
        """Slots of `group`, after a write window where one of them was absent."""
        row = self._table.slots[layer]
        slots = [row[expert] for expert in group]
        n_absent = sum(slot < 0 for slot in slots)
        self.io.hits += len(slots) - n_absent
        self.io.misses += n_absent
        if n_absent:
            with self._stall():
                slots = self._fetch(layer, tuple(group))
        return slots

    def busy_slots(self) -> Sequence[int]:
        """Arena slots that an unfinished copy reads: none where the device is synchronous."""
        return ()

    def _fetch(self, layer: int, group: tuple[int, ...], hints: Hints = ()) -> list[int]:
        """Slots of `group` after one answered request, or after a lost daemon's whole table."""
        while True:
            self.check_cancelled()
            answer = None
            try:
                answer = self.client.miss(
                    layer,
                    group,
                    busy=self.busy_slots(),
                    step=self._step,
                    hints=hints,
                    give_up=self.waiting.cancelled,
                )
            except DaemonLost as lost:
                self._recover(lost)
            if answer is not None:
                self._lost_since = None
                self.io.bytes_read += answer.n_bytes
                self._apply(answer.from_version, answer.to_version, answer.changes)
                self.check_cancelled()  # then some may have come back as CANCELLED
                if answer.errors:
                    raise _error_of(answer.errors)
            row = self._table.slots[layer]
            slots = [row[expert] for expert in group]
            if min(slots) >= 0:
                return slots
            if answer is not None:
                absent = group[slots.index(-1)]
                raise ProtocolError(
                    f"layer {layer} expert {absent} is still absent after the daemon's answer "
                    f"{answer.request}, which names no error"
                )

    # RowSource

    def request_all(self, wanted: Sequence[tuple[int, NDArray[np.int64]]]) -> list[int]:
        """Ask for rows of each (table, rows), a token's in one message; `take` waits for them."""
        handles: list[int] = []
        for job in row_jobs(wanted, self.client.max_rows):
            try:
                job.send(self.client)
            except DaemonLost:  # `take` recovers and asks again
                job.forget()
            for number in range(job.n_tables):
                handles.append(self._next_job)
                self._jobs[self._next_job] = (job, number)
                self._next_job += 1
        return handles

    def request(self, table: int, rows: NDArray[np.int64]) -> int:
        """Ask for rows of one Engram table."""
        return self.request_all([(table, rows)])[0]

    def take(self, handle: int) -> Tensor:
        """Return the rows [n, row_bytes] u8, each handle once. Raises as `stream` does."""
        tensor = torch.from_numpy(self.take_rows(handle))
        return tensor if self._device is None else tensor.to(self._device)

    def take_rows(self, handle: int) -> NDArray[np.uint8]:
        """Return what `take` does, in the host's memory."""
        job, number = self._jobs[handle]
        with self._stall():
            while True:
                self.check_cancelled()
                try:
                    rows = job.take(self.client, number)
                except DaemonLost as lost:
                    self._recover(lost)
                else:
                    self._lost_since = None
                    break
        del self._jobs[handle]
        return rows

    # steps

    def begin_step(self) -> None:
        """Forget what an abandoned step left behind."""
        self._picks.clear()
        for job, _ in self._jobs.values():
            job.drop(self.client)
        self._jobs.clear()
        # The device has always finished when a message is sent, so an epoch is done as it begins.
        self.client.epoch_done = self.client.begin_epoch()

    def end_step(self) -> None:
        """Commit a forward: report its picks, take the daemon's changes, acknowledge.

        A lost daemon is left for the next request to find.
        """
        picks = np.array(
            [(layer, expert) for layer, experts in self._picks for expert in experts], np.uint16
        )
        self._picks.clear()
        self._touch(self._step, picks)
        self._step += 1
        self._take_changes_if_there()

    def _touch(self, step: int, picks: NDArray[np.uint16]) -> None:
        """Tell a step's picks [n, 2], layers and experts. A lost daemon is not told."""
        try:
            if len(picks):
                self.client.touch(step, picks)
        except DaemonLost as lost:
            _LOG.debug("after step %d: %s", step, lost)

    def _take_changes_if_there(self) -> None:
        """As `take_changes`; a lost daemon is left for the next request to find."""
        try:
            self.take_changes()
        except DaemonLost as lost:
            _LOG.debug("between steps: %s", lost)

    def take_changes(self) -> None:
        """Apply the daemon's retirements, do what a resize asks for, acknowledge both.

        Only where nothing reads the arena.

        Raises DaemonLost.
        """
        arrived, resizes = self.client.changes(), self.client.memory_changes()
        if not arrived and not resizes and self._table.version == self._acked:
            return
        self._stop_reading()
        for changes in arrived:
            self._apply(changes.from_version, changes.to_version, changes.changes)
        for resized in resizes:
            self._resized(resized)
            if isinstance(resized, Drop):
                self.client.dropped(resized)
            else:
                self.client.added(resized)
                self._acked = -1
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

    # table

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
        for job, _ in self._jobs.values():
            job.forget()
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


def _error_of(faults: Sequence[tuple[int, int, str, str]]) -> HeadraceError:
    """The error of a request whose experts `faults` could not be had, in the daemon's words."""
    text = "; ".join(
        f"layer {layer} expert {expert}: {code}: {text}" for layer, expert, code, text in faults
    )
    if any(code in SHARD_CODES for _, _, code, _ in faults):
        return ShardError(text)
    return DaemonLost(text)
