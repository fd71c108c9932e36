"""A chunk's experts of one layer, part by part, as the daemon reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

from protocol.errors import DaemonLost, HeadraceError, ProtocolError

from . import messages as m

if TYPE_CHECKING:
    from .engine_calls import EngineCalls


class ExpertStream:
    """The parts of one Stream's answer, each to be applied as a MissRequest's answer is.

    Made by ExpertClient.stream; iterate over it, and say `consumed` of experts whose slots nothing
    reads any more: the daemon waits for that. Use it in a `with`, whose end cancels the rest;
    whoever keeps a table calls `close` before, since the answer to that has changes as well.
    Iterating raises as `ExpertClient.miss` does; at the deadline of a part the stream is cancelled
    and its final part returned.
    """

    def __init__(
        self,
        calls: EngineCalls,
        request: m.Stream,
        timeout_ms: float,
        give_up: Callable[[], bool] | None = None,
    ) -> None:
        self.request = request
        self.ended = False  # the window is closed
        self._calls = calls
        self._timeout_ms = timeout_ms
        self._give_up = give_up

    def __iter__(self) -> Iterator[m.SlotChanges]:
        return self

    def __next__(self) -> m.SlotChanges:
        """The next part; waits for it."""
        if self.ended:
            raise StopIteration
        try:
            part = self._calls.take_part(self.request.request, self._timeout_ms, self._give_up)
            if len(part.slots) != len(self.request.experts):
                self._calls.end_session("sent a part that does not fit its stream")
                raise ProtocolError(
                    f"layer {self.request.layer}: part with {len(part.slots)} slots for "
                    f"{len(self.request.experts)} experts"
                )
        except HeadraceError:
            self.ended = True
            raise
        self.ended = part.final
        return part

    def consumed(self, up_to: int) -> None:
        """Nothing reads the slots of the experts up to this one any more."""
        if not self.ended:
            self._calls.send_consumed(self.request.request, up_to)

    def close(self) -> m.SlotChanges | None:
        """Close the window, if it is open; return the answer, to be applied as every part is.

        None where there was none to close, or the daemon is gone: nothing is to be read then.
        """
        if self.ended:
            return None
        self.ended = True
        with suppress(DaemonLost):  # then no window is open
            return self._calls.close_window()
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
