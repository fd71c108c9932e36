"""Requests and answers over a connection: numbers, deadlines, what arrives in between.

One thread at a time. Messages that answer no request in progress are put aside for whoever drains
them, or passed over and counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from protocol.errors import DaemonBusy, DaemonLost, HeadraceError, ProtocolError

from . import messages as m
from .connection import Connection, Deadline
from .limits import CANCEL_MS, GIVE_UP_MS

if TYPE_CHECKING:
    from protocol.arena.attach import MappedArena

Answer = TypeVar("Answer")


class Requests:
    """What engine's, reader's and row calls share. ExpertClient makes the connection."""

    _connection: Connection
    _mapped: MappedArena

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._changes: list[m.Changes] = []
        self._memory_changes: list[m.Drop | m.Added] = []
        self._n_slots = 0  # slots that the engine can read; 0: as Welcome said
        self._rows_ready: dict[int, m.RowsReady | m.Refused] = {}
        self._rows_wanted: dict[int, int] = {}  # request -> rows of it
        self.n_passed_over = 0  # messages that nobody waited for

    @property
    def n_slots(self) -> int:
        """Slots of the arena that the engine can read now."""
        return self._n_slots

    def _begin_session(self) -> None:
        """Forget what the last session owed."""
        self._changes.clear()
        self._memory_changes.clear()
        self._n_slots = self._connection.welcome.n_slots
        self._rows_ready.clear()
        self._rows_wanted.clear()

    def _next_number(self) -> int:
        return next(self._numbers)

    def _ask(
        self,
        message: m.Message,
        number: int,
        kinds: type[Answer] | tuple[type[Answer], ...],
        timeout_ms: float,
    ) -> Answer:
        """The answer to a request without effects; raises DaemonLost where none comes in time."""
        self._connection.send(message)
        answer = self._answer(number, kinds, Deadline(timeout_ms))
        if answer is None:
            name = type(message).__name__
            raise DaemonLost(f"no answer to {name} within {timeout_ms:g} ms")
        return answer

    def _settle(
        self,
        message: m.Message,
        number: int,
        kinds: Any,
        timeout_ms: float,
        give_up: Callable[[], bool] | None = None,
    ) -> tuple[Any, bool]:
        """(answer, in time) of a request with effects: cancelled at the deadline, never forgotten.

        give_up   asked every GIVE_UP_MS: True is as good as the deadline

        Raises DaemonLost, and ends the session, where not even Cancel is answered.
        """
        self._connection.send(message)
        return self._settled(number, kinds, type(message).__name__, timeout_ms, give_up)

    def _settled(
        self,
        number: int,
        kinds: Any,
        name: str,
        timeout_ms: float,
        give_up: Callable[[], bool] | None,
    ) -> tuple[Any, bool]:
        """What `_settle` does once the request has left."""
        answer = self._await(number, kinds, timeout_ms, give_up)
        if answer is not None:
            return answer, True
        return self._cancel(number, kinds, name, timeout_ms), False

    def _await(
        self, number: int, kinds: Any, timeout_ms: float, give_up: Callable[[], bool] | None
    ) -> Any:
        """The next answer to a request, None at the deadline or when it was given up."""
        deadline = Deadline(timeout_ms)
        while True:
            wait_ms = deadline.left_ms if give_up is None else min(deadline.left_ms, GIVE_UP_MS)
            answer = self._answer(number, kinds, Deadline(wait_ms))
            is_over = deadline.left_ms == 0 or (give_up is not None and give_up())
            if answer is not None or is_over:
                return answer

    def _cancel(self, number: int, kinds: Any, name: str, timeout_ms: float) -> Any:
        self._connection.send(m.Cancel(number))
        answer = self._answer(number, kinds, Deadline(CANCEL_MS))
        if answer is None:
            self._connection.lose(
                f"answered neither {name} {number} within {timeout_ms:g} ms "
                f"nor its Cancel within {CANCEL_MS} ms"
            )
        return answer

    def _answer(
        self, number: int, kinds: type[Answer] | tuple[type[Answer], ...], deadline: Deadline
    ) -> Answer | None:
        while True:
            message = self._connection.receive(deadline)
            if message is None:
                return None
            if isinstance(message, kinds) and getattr(message, "request", number) == number:
                return message
            self._put_aside(message, number)

    def _drain(self) -> None:
        """Take what has arrived, without waiting; raises DaemonLost when the daemon is gone."""
        now = Deadline(0)
        while True:
            message = self._connection.receive(now)
            if message is None:
                return
            self._put_aside(message, 0)

    def _put_aside(self, message: m.Message, waiting_for: int) -> None:
        if isinstance(message, m.Changes):
            self._changes.append(message)
        elif isinstance(message, m.Drop | m.Added):
            self._memory_changes.append(message)
        elif isinstance(message, m.Ping):
            self._connection.send_if_possible(m.Pong(message.request))
        elif isinstance(message, m.RowsReady):
            self._put_rows_aside(message)
        elif isinstance(message, m.Leased):
            self._give_back(message.leases)
        elif isinstance(message, m.Refused):
            self._refused(message, waiting_for)
        else:
            self.n_passed_over += 1

    def _put_rows_aside(self, message: m.RowsReady) -> None:
        if message.request in self._rows_wanted:
            self._rows_ready[message.request] = message
        else:
            self._connection.send_if_possible(m.RowsDone(message.request))

    def _give_back(self, leases: tuple[tuple[int, int, int, int], ...]) -> None:
        if leases:
            pairs = tuple((slot, generation) for _, _, slot, generation in leases)
            self._connection.send_if_possible(m.Release(pairs))

    def _refused(self, message: m.Refused, waiting_for: int) -> None:
        """Raise what a refusal means, unless it is about something that nobody waits for."""
        if message.reason in ("hello_first", "stale"):
            self._connection.lose(f"knows this session no more: {message.text}")
        if message.request == 0:
            # It may be about anything, an open window too: only a new session is sure.
            self._connection.end(f"refused ({message.reason}): {message.text}")
            raise refusal(message)
        if message.request == waiting_for:
            raise refusal(message)
        if message.request in self._rows_wanted:
            self._rows_ready[message.request] = message
        else:
            self.n_passed_over += 1


def refusal(message: m.Refused) -> HeadraceError:
    """The error that a refusal stands for."""
    text = f"refused ({message.reason}): {message.text}"
    return DaemonBusy(text) if message.reason == "busy" else ProtocolError(text)
