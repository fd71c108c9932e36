"""Server-sent events, and work that ends when its client leaves.

Invariants: an event is sent as soon as it is there; a client that takes nothing for the write
timeout is hung up on; whatever happens, the work behind a response is ended with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")

KEEP_ALIVE_S = 10.0
_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


def sse(data: Any, event: str | None = None) -> bytes:
    """Return one event; data that is no string is written as JSON."""
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    head = "" if event is None else f"event: {event}\n"
    return f"{head}data: {text}\n\n".encode()


def comment(text: str) -> bytes:
    """Return a line that clients pass over."""
    return f": {text}\n\n".encode()


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return what `work` returns; where the client leaves first, end it and raise.

    The body must have been read. Raises ClientDisconnect, and what `work` raises.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.gather(leaving, working, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response whose events come from an iterator.

    events            closed when the response ends, however it does
    at_end            awaited then: events that were never begun cannot end what they hold
    keep_alive        sent when nothing has come for KEEP_ALIVE_S
    write_timeout_s   how long a client may take nothing
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        write_timeout_s: float,
        at_end: Callable[[], Awaitable[None]],
        keep_alive: bytes = comment("still here"),
        headers: dict[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._at_end = at_end
        self._keep_alive = keep_alive
        self._write_timeout_s = write_timeout_s
        self.init_headers(_HEADERS | (headers or {}))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end, the client leaves, or it reads nothing for long."""
        try:
            await while_connected(receive, self._send_all(send))
        except ClientDisconnect:
            pass
        except TimeoutError:
            scope.get("state", {}).get("abort", _nothing)()
        finally:
            await self._events.aclose()
            await self._at_end()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async with contextlib.aclosing(_paced(self._events, self._keep_alive)) as paced:
            await self._send(send, start)
            async for event in paced:
                await self._send(
                    send, {"type": "http.response.body", "body": event, "more_body": True}
                )
            await self._send(send, {"type": "http.response.body", "body": b""})

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        async with asyncio.timeout(self._write_timeout_s):
            await send(message)


async def _paced(
    events: AsyncGenerator[bytes, None], keep_alive: bytes
) -> AsyncGenerator[bytes, None]:
    """Yield the events, and `keep_alive` wherever nothing comes for long; close them at the end."""
    coming: asyncio.Task[bytes | None] | None = None
    try:
        while True:
            if coming is None:
                coming = asyncio.ensure_future(anext(events, None))
            await asyncio.wait({coming}, timeout=KEEP_ALIVE_S)
            if not coming.done():
                yield keep_alive
                continue
            event = coming.result()
            coming = None
            if event is None:
                return
            yield event
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
        await events.aclose()


def _nothing() -> None:
    """There is no connection to abort."""
