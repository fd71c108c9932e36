"""Errors as each API writes them.

OpenAI: {"error": {"message", "type", "param", "code"}}. Anthropic: {"type": "error", "error":
{"type", "message"}, "request_id"}. The status decides the type; clients go by both.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

from starlette.responses import JSONResponse

from compute.frontend.compute_link import ComputeLost, ComputeRefused, NotNow
from compute.frontend.encoding import RequestError
from protocol.errors import HeadraceError

RETRY_LOST_S = 2  # compute starts again within seconds, or much later
STOPPING = "this server is stopping"


class Shape(Enum):
    """Whose clients read the answer."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


class ApiError(Exception):
    """An answer that says no.

    status    HTTP status
    param     the field at fault
    code      OpenAI's short word for some errors
    retry_s   seconds for Retry-After; None: none
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_s = retry_s


_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(shape: Shape, error: ApiError, request_id: str) -> dict[str, Any]:
    """Return the JSON of an error."""
    fallback = "api_error" if error.status >= 500 else "invalid_request_error"
    if shape is Shape.ANTHROPIC:
        kind = _ANTHROPIC_TYPES.get(error.status, fallback)
        inner = {"type": kind, "message": error.message}
        return {"type": "error", "error": inner, "request_id": request_id}
    kind = _OPENAI_TYPES.get(error.status, "server_error" if error.status >= 500 else fallback)
    code = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return {"error": code}


def error_response(shape: Shape, error: ApiError, request_id: str) -> JSONResponse:
    """Return the answer that an error is."""
    headers = {} if error.retry_s is None else {"retry-after": str(error.retry_s)}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_body(shape, error, request_id), error.status, headers)


def shape_of(path: str) -> Shape:
    """Return whose endpoint a path is; everybody else reads OpenAI's shape."""
    return Shape.ANTHROPIC if path.startswith("/v1/messages") else Shape.OPENAI


def api_error(error: HeadraceError) -> ApiError:
    """Return what a client is told of one of our errors."""
    if isinstance(error, RequestError):
        return ApiError(error.status, str(error), param=error.param, code=error.code)
    if isinstance(error, NotNow):
        return ApiError(503, str(error), retry_s=RETRY_LOST_S)
    if isinstance(error, ComputeLost):
        return ApiError(503, f"the model is not there now: {error}", retry_s=RETRY_LOST_S)
    if isinstance(error, ComputeRefused):
        return _refused(error)
    return ApiError(500, str(error))


def _refused(error: ComputeRefused) -> ApiError:
    if error.reason == "busy":
        retry_s = max(1, math.ceil(error.retry_ms / 1000))
        return ApiError(429, str(error), code="queue_full", retry_s=retry_s)
    if error.reason == "limit":
        return ApiError(400, str(error), param="messages", code="context_length_exceeded")
    if error.reason == "malformed":
        return ApiError(400, str(error))
    return ApiError(503, f"the model is not there now: {error}", retry_s=RETRY_LOST_S)


def ended_badly(fault: str, text: str) -> ApiError:
    """Return what a client is told of a generation that ended with an error."""
    if fault == "request":
        return ApiError(400, text)
    if fault == "daemon":
        return ApiError(503, text, retry_s=RETRY_LOST_S)
    return ApiError(500, text)
