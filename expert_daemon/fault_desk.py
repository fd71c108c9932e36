"""Messages about experts that could not be trusted."""

from __future__ import annotations

from protocol.wire.messages import Answered, Unquarantine

from .outbox import Outbox
from .sessions import Session
from .works import Works


class FaultDesk:
    """Lifts quarantines."""

    def __init__(self, outbox: Outbox, works: Works) -> None:
        self._outbox = outbox
        self._faults = works.loading.faults

    def unquarantine(self, session: Session, message: Unquarantine) -> None:
        """Read these keys again from now on; what they have now is taken as theirs."""
        lifted = self._faults.lift(message.keys)
        text = f"lifted from {len(lifted)} of {len(message.keys)} experts"
        self._outbox.send(session, Answered(message.request, ok=bool(lifted), text=text))
