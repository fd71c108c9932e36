"""The Trace message: a routing trace is turned on or off while the daemon serves."""

from __future__ import annotations

from pathlib import Path

from protocol.errors import ConfigError
from protocol.wire.messages import Answered, Trace

from .outbox import Outbox
from .sessions import Session
from .trace import Tracing


class TraceDesk:
    """Answers Trace."""

    def __init__(self, tracing: Tracing, outbox: Outbox) -> None:
        self._tracing = tracing
        self._outbox = outbox

    def trace(self, session: Session, message: Trace) -> None:
        """Begin, or go on with, the trace in the file named; or end the running one."""
        try:
            text = self._start(message.path) if message.on else self._stop()
            answer = Answered(message.request, ok=True, text=text)
        except ConfigError as error:
            answer = Answered(message.request, ok=False, text=str(error))
        self._outbox.send(session, answer)

    def _start(self, path: str) -> str:
        if not path.startswith("/"):
            raise ConfigError(f"trace {path!r}: wanted a path from / on, the daemon has no folder")
        self._tracing.start(Path(path))
        return f"recording to {path}"

    def _stop(self) -> str:
        path = self._tracing.values()["trace"]
        self._tracing.stop()
        return f"{path} has ended" if path else "no trace was running"
