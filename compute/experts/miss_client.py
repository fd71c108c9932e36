"""Experts and Engram rows from the expert daemon: the engine's side of the write windows.

Invariants, beside those of `arena_link.py`: a slot is read only while no window of ours is open or
by the layer that opened it; retirements are taken at a step's end and after a layer that streamed;
where all of a layer's experts are present, no message is sent; a window that is closed early is
applied before anything is read. One thread uses it. The device is synchronous, so no copy or kernel
is ever unfinished when a request leaves: `busy` is empty and every epoch done.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compute.model.sources import ExpertMatrices
from protocol.errors import DaemonLost, HeadraceError, ProtocolError, ShardError
from protocol.wire.client import ExpertClient
from protocol.wire.expert_stream import ExpertStream
from protocol.wire.messages import SlotChanges
from protocol.wire.reader_calls import SHARD_CODES

from .arena_link import ArenaLink
from .arena_view import PieceShapes
from .request_io import IoCounters, RequestCancelled, Waiting
from .row_jobs import RowJob, row_jobs
from .stream_window import STREAM_WINDOW, n_foreseen

__all__ = ["IoCounters", "MissClient", "RequestCancelled", "Waiting"]

Hints = Sequence[tuple[int, int]]  # keys that may be wanted later in the step


class MissClient(ArenaLink):
    """ExpertSource and RowSource over an `ExpertClient`; takes what `ArenaLink` takes."""

    def __init__(
        self,
        client: ExpertClient,
        shapes: Sequence[PieceShapes],
        waiting: Waiting | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._step = 0
        self.n_begun = 0  # steps begun
        self._picks: list[tuple[int, Sequence[int]]] = []
        self._jobs: dict[int, tuple[RowJob, int]] = {}  # by handle, with the table's place in it
        self._next_job = 0
        super().__init__(client, shapes, waiting, device)

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
        with self._if_there(f"after layer {layer}"):
            self.take_changes()  # nothing reads the arena now

    def _named(
        self, layer: int, experts: Sequence[int], ahead: list[tuple[int, int]]
    ) -> Iterator[tuple[int, int]]:
        """Yield (expert, slot), ascending; once it is advanced nothing reads the slot any more."""
        unsaid = 0
        with self.client.stream(
            layer,
            experts,
            window=STREAM_WINDOW,
            busy=self.busy_slots(),
            step=self._step,
            ahead=ahead,
            give_up=self.waiting.cancelled,
        ) as stream:
            try:
                while not stream.ended:
                    named = self._next_part(stream)
                    for place, (expert, slot) in enumerate(named, 1):
                        yield expert, slot
                        unsaid += 1
                        if place == len(named) or unsaid >= STREAM_WINDOW // 4:
                            stream.consumed(expert)
                            unsaid = 0
            finally:
                self._apply_last(stream.close())

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

    def _apply_last(self, answer: SlotChanges | None) -> None:
        """Apply what a window brought that was closed before its end: slots have other keys now."""
        if answer is not None:
            with self._if_there("after a window closed early"):
                self._apply(answer.from_version, answer.to_version, answer.changes)

    def _expected(self, layer: int, n_picked: int) -> list[tuple[int, int]]:
        """Absent keys of a layer that a chunk will want, where it wanted most of the last one's.

        Where the arena may hold every expert each is read but once: nothing is foreseen then.
        """
        welcome = self.client.welcome
        n_keys = welcome.n_layers * welcome.n_experts
        n = n_foreseen(n_picked, welcome.n_experts)
        if layer >= welcome.n_layers or not n or welcome.n_slots >= n_keys:
            return []
        row = self._table.slots[layer]
        absent = [(layer, expert) for expert, slot in enumerate(row) if slot < 0]
        return absent[:n]

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

    def _has_asked(self) -> None:
        """Called once a request for experts has left: nothing, where there is nothing to copy."""

    def _fetch(self, layer: int, group: tuple[int, ...]) -> list[int]:
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
                    give_up=self.waiting.cancelled,
                    meanwhile=self._has_asked,
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
        """Forget what an abandoned step left behind: rows that it asked for as well."""
        self.n_begun += 1
        self._picks.clear()
        for job, _ in self._jobs.values():
            job.drop(self.client)
        self._jobs.clear()
        with self._if_there("before a step"):
            self._apply_last(self.client.close_window())
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
        with self._if_there("between steps"):
            self.take_changes()

    def _forget_requests(self) -> None:
        """The rows that a lost daemon owes: `take` asks the next one for them."""
        for job, _ in self._jobs.values():
            job.forget()


def _error_of(faults: Sequence[tuple[int, int, str, str]]) -> HeadraceError:
    """The error of a request whose experts `faults` could not be had, in the daemon's words."""
    text = "; ".join(
        f"layer {layer} expert {expert}: {code}: {text}" for layer, expert, code, text in faults
    )
    if any(code in SHARD_CODES for _, _, code, _ in faults):
        return ShardError(text)
    return DaemonLost(text)
