"""The Trace message: a routing trace is turned on or off while the daemon serves.

Runs on the loop's thread, which no disk is waited for on: the answer goes out when the recorder's
thread has opened the file or let go of it, or after ANSWER_S with what is known by then.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import ConfigError
from protocol.files.plain_file import check_path
from protocol.wire.messages import Answered, Trace

from .log import ClientLog
from .outbox import Outbox
from .sessions import Session, Sessions
from .trace import TraceRecorder, Tracing

ANSWER_S = 0.5  # the client's deadline is twice that


@dataclass(slots=True)
class _Asked:
    """A Trace message that is not answered yet."""

    session: int
    request: int
    recorder: TraceRecorder
    on: bool
    is_late: bool = False


class TraceDesk:
    """Answers Trace."""

    def __init__(
        self,
        sessions: Sessions,
        outbox: Outbox,
        tracing: Tracing,
        loop: asyncio.AbstractEventLoop,
        clients: ClientLog,
    ) -> None:
        self._sessions = sessions
        self._outbox = outbox
        self._tracing = tracing
        self._loop = loop
        self._asked: list[_Asked] = []
        tracing.on_change = self._call_look
        tracing.clients = clients
        tracing.look()

    def trace(self, session: Session, message: Trace) -> None:
        """Begin, or go on with, the trace in the file named; or end the running one."""
        try:
            recorder = self._begin(message.path) if message.on else self._tracing.stop()
        except ConfigError as error:
            self._answer(session.number, message.request, str(error), ok=False)
            return
        if recorder is None:
            self._answer(session.number, message.request, "no trace was running", ok=True)
            return
        asked = _Asked(session.number, message.request, recorder, message.on)
        self._asked.append(asked)
        self._loop.call_later(ANSWER_S, self._is_late, asked)
        self._look()

    def _begin(self, path: str) -> TraceRecorder:
        check_path(path, "trace")
        if not path.startswith("/"):
            shown = repr(path[:100])
            raise ConfigError(f"trace {shown}: wanted a path from / on, the daemon has no folder")
        return self._tracing.begin(Path(path))

    def _call_look(self) -> None:
        """On any thread; the loop may have ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._look_unasked)

    def _is_late(self, asked: _Asked) -> None:
        asked.is_late = True
        self._look_unasked()

    def _look_unasked(self) -> None:
        self._look()
        self._outbox.look_again()

    def _look(self) -> None:
        self._tracing.look()
        all_asked, self._asked = self._asked, []
        for asked in all_asked:
            outcome = self._started(asked) if asked.on else _stopped(asked)
            if outcome is None:
                self._asked.append(asked)
            else:
                self._answer(asked.session, asked.request, outcome[0], ok=outcome[1])

    def _started(self, asked: _Asked) -> tuple[str, bool] | None:
        """Return the answer's text and whether it is a success; None: not known yet."""
        recorder = asked.recorder
        if asked.is_late:
            self._tracing.give_up(recorder)
        if recorder.error:
            return recorder.error, False
        return (f"recording to {recorder.path}", True) if recorder.is_open else None

    def _answer(self, number: int, request: int, text: str, *, ok: bool) -> None:
        session = self._sessions.by_number.get(number)
        if session is not None:
            self._outbox.send(session, Answered(request, ok, text))


def _stopped(asked: _Asked) -> tuple[str, bool] | None:
    path = asked.recorder.path
    if asked.recorder.has_ended.is_set():
        return f"{path} has ended", True
    if asked.is_late:
        return f"{path} has ended; its disk does not answer, the last steps are lost", True
    return None
