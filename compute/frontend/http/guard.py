"""What stands before every endpoint: who may ask, how many at once, which request it was.

With a token file a request needs one of its tokens, as `Authorization: Bearer` or `x-api-key`.
Without one the server listens on loopback only and takes any; then the Host header must name this
machine, so that a web page somewhere cannot reach it through a name that it controls, and so must
the Origin header that browsers send. The files of our own page need no token: they hold no data.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from compute.frontend.config import is_loopback

from .errors import RETRY_LOST_S, STOPPING, ApiError, error_response, shape_of
from .page import PAGE_PATHS

_LOG = logging.getLogger("headrace.frontend")
OPEN_PATHS = frozenset({"/health", "/ready"})
QUIET_PATHS = OPEN_PATHS | {"/metrics", "/v1/headrace/state"}  # asked for again and again
MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 << 10
_RETRY_CROWD_S = 1


class Guard:
    """The outermost application.

    tokens       allowed ones; none: anybody on this machine
    max_active   requests at once
    note         told of each response: (path, status, seconds)
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        tokens: Sequence[bytes],
        max_active: int,
        note: Callable[[str, int, float], None],
    ) -> None:
        self._app = app
        self._tokens = tuple(tokens)
        self._max_active = max_active
        self._note = note
        self.n_active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or say why not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id
        started = time.monotonic()
        status = 0

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["request-id"] = request_id
            await send(message)

        self.n_active += 1
        try:
            objection = self._objection(scope)
            if objection is not None:
                response = error_response(shape_of(scope["path"]), objection, request_id)
                await response(scope, receive, told)
            else:
                await self._app(scope, receive, told)
        except asyncio.CancelledError:  # by the end of the server alone, which waited before
            if status:
                await _hang_up(scope, receive)
            else:
                stopping = ApiError(503, STOPPING, retry_s=RETRY_LOST_S)
                response = error_response(shape_of(scope["path"]), stopping, request_id)
                await response(scope, receive, told)
        finally:
            self.n_active -= 1
            self._ended(scope, status, time.monotonic() - started)

    def _objection(self, scope: MutableMapping[str, Any]) -> ApiError | None:
        found = scope["headers"]
        n_bytes = sum(len(name) + len(value) for name, value in found)
        if len(found) > MAX_HEADERS or n_bytes > MAX_HEADER_BYTES:
            return ApiError(
                431,
                f"{len(found)} headers of {n_bytes} bytes; at most {MAX_HEADERS} of "
                f"{MAX_HEADER_BYTES} bytes together are read",
            )
        if scope["path"] in OPEN_PATHS:
            return None
        headers = Headers(scope=scope)
        if self._tokens:
            if scope["path"] not in PAGE_PATHS and not self._has_token(headers):
                return ApiError(401, "a bearer token of this server is needed", code="no_token")
        elif not _names_this_machine(headers.get("host", "")):
            return ApiError(403, f"host {headers.get('host')!r} is not this machine")
        elif not _comes_from_this_machine(headers.get("origin")):
            return ApiError(403, f"a page of {headers.get('origin')!r} may not ask this server")
        if self.n_active > self._max_active:
            return ApiError(429, "too many requests at once", retry_s=_RETRY_CROWD_S)
        return None

    def _has_token(self, headers: Headers) -> bool:
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        found = [hmac.compare_digest(given.encode(), token) for token in self._tokens]
        return any(found)

    def _ended(self, scope: MutableMapping[str, Any], status: int, seconds: float) -> None:
        path = scope["path"]
        self._note(path, status, seconds)
        if path not in QUIET_PATHS:
            said = status or "left"
            raw = scope["raw_path"].decode("ascii", "replace")
            _LOG.info("%s %s %s %.3f s", scope["method"], raw, said, seconds)


async def _hang_up(scope: Scope, receive: Receive) -> None:
    """End a response in its middle, so that the client sees that it is not whole."""
    abort = scope["state"].get("abort")
    if abort is not None:
        abort()
        while (await receive())["type"] != "http.disconnect":
            pass


def _comes_from_this_machine(origin: str | None) -> bool:
    """Whether a request is of no web page, or of one that this machine serves."""
    if origin is None:
        return True
    scheme, _, host = origin.partition("://")
    return scheme not in ("http", "https", "null") or _names_this_machine(host)


def _names_this_machine(host: str) -> bool:
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    return is_loopback(name.strip("[]").lower())
