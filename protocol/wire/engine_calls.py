"""The engine's side of the client: write windows, changes, acknowledgements, advice.

The client applies no change: the engine does, to its own table, and says so by `applied`. A window
that an interrupt left open is closed by a Cancel before the next one opens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, SupportsInt

import numpy as np

from protocol.arena.plan import APPLIED, EPOCH_DONE, EPOCH_LAUNCHED
from protocol.errors import DaemonLost, HeadraceError, ProtocolError

from . import messages as m
from .connection import Deadline
from .expert_stream import ExpertStream
from .limits import CANCEL_MS, HELLO_MS, MISS_MS
from .records import PICK
from .requests import Requests


class EngineCalls(Requests):
    """Calls of the role "engine"."""

    def __init__(self) -> None:
        super().__init__()
        self.applied = 0  # table version that the engine's table reflects; set by the engine
        self.epoch_done = 0  # work up to this epoch has completed; set by the engine or by ack
        self.epoch_launched = 0  # the last epoch that has begun
        # Whether `miss` waits without sleeping: what is called after a sleep of milliseconds takes
        # several times as long. Set by an engine that has a processor to spare.
        self.spins = False
        self._open_window = 0  # request whose final answer has not come

    def _begin_session(self) -> None:
        super()._begin_session()
        self.applied = 0
        self._open_window = 0

    def _show_epochs(self) -> None:
        """Write this process's words: those of an engine before it mean nothing."""
        words = self._mapped.view.epochs
        words[APPLIED], words[EPOCH_DONE] = self.applied, self.epoch_done
        words[EPOCH_LAUNCHED] = self.epoch_launched

    def begin_epoch(self) -> int:
        """Number what is about to be launched: call it before anything of it may read the arena."""
        self.epoch_launched += 1
        self._mapped.view.epochs[EPOCH_LAUNCHED] = self.epoch_launched
        return self.epoch_launched

    def miss(
        self,
        layer: SupportsInt,
        experts: Iterable[SupportsInt],
        *,
        busy: Iterable[SupportsInt] = (),
        step: int = 0,
        hints: Iterable[tuple[int, int]] = (),
        timeout_ms: float = MISS_MS,
        give_up: Callable[[], bool] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> m.SlotChanges:
        """Open a write window for these experts and return the answer that closed it.

        experts    ascending, hits included, at most welcome.max_experts
        busy       slots that unfinished work still reads, or `meanwhile` will, ascending
        give_up    asked while waiting; once it says so the request is cancelled as at its deadline
        meanwhile  called once the request has left

        Errors of single experts are in the answer, and its changes apply all the same. At the
        deadline the request is cancelled and its final answer returned. Raises DaemonLost where
        none comes: then nothing that reads the arena may run before the next Welcome.
        """
        self.close_window()
        request = m.MissRequest(
            request=self._next_number(),
            step=step,
            layer=int(layer),
            experts=tuple(map(int, experts)),
            busy=tuple(map(int, busy)),
            applied=self.applied,
            epoch_done=self.epoch_done,
            hints=tuple((int(la), int(ex)) for la, ex in hints),
        )
        return self._through_window(request, timeout_ms, give_up, meanwhile)

    def _through_window(
        self,
        request: m.MissRequest,
        timeout_ms: float,
        give_up: Callable[[], bool] | None,
        meanwhile: Callable[[], None] | None,
    ) -> m.SlotChanges:
        self._open_window = number = request.request
        connection = self._connection
        connection.send(request)
        if meanwhile is not None:
            meanwhile()  # what it raises leaves the window open, as an interrupt does
        connection.spins = self.spins
        try:
            answer: m.SlotChanges
            name = type(request).__name__
            answer, _ = self._settled(number, m.SlotChanges, name, timeout_ms, give_up)
        except HeadraceError:  # refused, or the session is over: no window is open
            self._open_window = 0
            raise
        finally:
            connection.spins = False
        self._open_window = 0
        if len(answer.slots) != len(request.experts) or not answer.final:
            self._connection.end("sent an answer that does not fit its request")
            raise ProtocolError(
                f"layer {request.layer}: answer with {len(answer.slots)} slots for "
                f"{len(request.experts)} experts, final {answer.final}"
            )
        return answer

    def stream(
        self,
        layer: SupportsInt,
        experts: Iterable[SupportsInt],
        *,
        window: int,
        busy: Iterable[SupportsInt] = (),
        step: int = 0,
        ahead: Iterable[tuple[int, int]] = (),
        timeout_ms: float = MISS_MS,
        give_up: Callable[[], bool] | None = None,
    ) -> ExpertStream:
        """Ask for a chunk's experts of one layer, which may be more than the arena holds.

        experts     ascending, hits included, any number
        window      most experts that are read and not yet consumed
        busy        slots that unfinished work still reads, ascending
        ahead       keys that the next layer is expected to want, in that order
        timeout_ms  for each part
        give_up     asked while waiting for one; once it says so the stream is cancelled

        Until it has ended nothing may read a slot but those of experts that a part named and that
        were not consumed.
        """
        self.close_window()
        request = m.Stream(
            request=self._next_number(),
            step=step,
            layer=int(layer),
            experts=tuple(map(int, experts)),
            window=window,
            applied=self.applied,
            epoch_done=self.epoch_done,
            busy=tuple(map(int, busy)),
            ahead=tuple((int(la), int(ex)) for la, ex in ahead),
        )
        self._connection.send(request)
        self._open_window = request.request
        return ExpertStream(self, request, timeout_ms, give_up)

    def take_part(
        self, number: int, timeout_ms: float, give_up: Callable[[], bool] | None
    ) -> m.SlotChanges:
        """The next part of a stream's answer; at the deadline its final one, after a Cancel."""
        part: m.SlotChanges | None
        try:
            part = self._await(number, m.SlotChanges, timeout_ms, give_up)
            if part is None:
                part = self._cancel_window(number, "Stream", timeout_ms)
        except HeadraceError:
            self._open_window = 0
            raise
        if part.final:
            self._open_window = 0
        return part

    def send_consumed(self, number: int, up_to: int) -> None:
        """Say that the slots of a stream's experts up to this one are read no more."""
        self._connection.send(m.Consumed(number, int(up_to)))

    def end_session(self, why: str) -> None:
        """Say nothing further to a daemon that did what it may not."""
        self._open_window = 0
        self._connection.end(why)

    def close_window(self) -> m.SlotChanges | None:
        """End a window that was left open; return its answer, None where none was open.

        It is to be applied as any, before anything is read; where a request is to follow at once,
        the answer to that covers its changes too. Raises DaemonLost.
        """
        if not self._open_window:
            return None
        number, self._open_window = self._open_window, 0
        return self._cancel_window(number, "request", 0)

    def _cancel_window(self, number: int, name: str, timeout_ms: float) -> m.SlotChanges:
        """The final answer of a request after its Cancel; parts before it are passed over."""
        deadline = Deadline(CANCEL_MS)
        self._connection.send(m.Cancel(number))
        while True:
            answer = self._answer(number, m.SlotChanges, deadline)
            if answer is None:
                self._connection.lose(
                    f"answered neither {name} {number} within {timeout_ms:g} ms "
                    f"nor its Cancel within {CANCEL_MS} ms"
                )
            if answer.final:
                return answer

    def changes(self) -> list[m.Changes]:
        """What the daemon changed outside of windows, oldest first, without waiting.

        Apply one iff `from_version <= applied < to_version`; a gap means resync. Answers the
        daemon's Pings too. Raises DaemonLost when the daemon is gone.
        """
        self._drain()
        arrived, self._changes = self._changes, []
        return arrived

    def ack(self, applied: int, epoch_done: int = 0) -> None:
        """Say that the table reflects `applied` and that work up to `epoch_done` has ended."""
        self.applied = int(applied)
        self.epoch_done = max(self.epoch_done, int(epoch_done))
        words = self._mapped.view.epochs
        words[APPLIED], words[EPOCH_DONE] = self.applied, self.epoch_done
        self._connection.send(m.Ack(self.applied, self.epoch_done, self._n_slots))

    def resync(self) -> m.Welcome:
        """The whole table anew; changes that came before it are dropped. Raises DaemonLost."""
        self.close_window()
        number = self._next_number()
        self._connection.send(m.Resync(self.applied, number))
        welcome = self._answer(number, m.Welcome, Deadline(HELLO_MS))
        if welcome is None:
            raise DaemonLost(f"no answer to Resync within {HELLO_MS} ms")
        self._connection.replace_welcome(welcome)
        self._changes.clear()
        return welcome

    def memory_changes(self) -> list[m.Drop | m.Added]:
        """What a resize asks of the engine, oldest first, without waiting.

        At a step boundary: of a Drop unregister its chunks, then call `dropped`; of an Added
        register its chunks, then call `added`.
        """
        self._drain()
        arrived, self._memory_changes = self._memory_changes, []
        return arrived

    def dropped(self, drop: m.Drop) -> None:
        """Say that no chunk of this Drop is registered any more beyond what remains."""
        self._n_slots = drop.n_slots
        self._connection.send(m.Dropped(drop.chunks))

    def added(self, added: m.Added) -> None:
        """Note that the chunks of this Added can be read; the next `ack` says so."""
        self._n_slots = added.n_slots

    def touch(self, step: int, picks: Any) -> None:
        """Tell all committed picks of a step, (layer, expert) rows [n, 2]. Never waits.

        Raises ValueError on a key that the model does not have.
        """
        pairs = np.asarray(picks).reshape(-1, 2)
        if not len(pairs):
            return
        welcome = self._connection.welcome
        ends = (welcome.n_layers, welcome.n_experts)
        if (pairs < 0).any() or (pairs >= ends).any():
            raise ValueError(f"picks up to {pairs.max(axis=0)}, wanted below {ends}")
        keys = np.unique(pairs.astype(np.int64) @ np.array([1 << 16, 1]))
        records = np.empty(len(keys), PICK)
        records["layer"] = keys >> 16
        records["expert"] = keys & 0xFFFF
        self._connection.send_if_possible(m.Touch(int(step), records.tobytes()))

    def warm(self, keys: Iterable[tuple[int, int]]) -> None:
        """Ask for keys to be loaded when the daemon is idle, the hottest first. Never waits.

        They take the place of those of the last call that are not loaded yet. Stats tells how far
        it is: `n_warm`, `n_warm_passed`, `warm_left`.
        """
        pairs = list(dict.fromkeys((int(la), int(ex)) for la, ex in keys))
        if pairs:
            self._connection.send_if_possible(m.Warm(np.array(pairs, PICK).tobytes()))

    def hint(self, step: int, layer: int, experts: Iterable[int]) -> None:
        """Tell which experts a layer may want, best first. Never waits."""
        ranked = tuple(dict.fromkeys(map(int, experts)))
        if ranked:
            self._connection.send_if_possible(m.Hint(int(step), int(layer), ranked))
