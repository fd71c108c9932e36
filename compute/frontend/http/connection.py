"""A connection of the server: slow headers are not waited for, and it can be aborted."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

HEADERS_S = 20.0  # from the first byte of a request, or the connection's begin, to its last header


class TimedConnection(H11Protocol):
    """uvicorn's connection with a deadline for headers; `scope["state"]["abort"]` drops it."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, "abort": transport.abort}
        self._set_deadline(waits=True)

    def data_received(self, data: bytes) -> None:
        """Some bytes have come."""
        super().data_received(data)
        cycle: RequestResponseCycle | None = self.cycle
        self._set_deadline(waits=cycle is None or cycle.response_complete)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._set_deadline(waits=False)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """A response is over: the keep-alive timer of the base class waits for the next one."""
        self._set_deadline(waits=False)
        super().on_response_complete()

    def _set_deadline(self, *, waits: bool) -> None:
        if not waits and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        elif waits and self._deadline is None:
            self._deadline = self.loop.call_later(HEADERS_S, self.transport.abort)
