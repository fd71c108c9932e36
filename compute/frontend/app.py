"""The application: every path and who answers it."""

from __future__ import annotations

import contextlib

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .apis.chat import read_chat
from .apis.completions import read_completion
from .apis.endpoint import GeneratingEndpoint, Handler, guarded
from .apis.messages import count_tokens, read_messages
from .apis.models import list_models, one_model
from .apis.openapi import openapi_document
from .apis.own import state, why
from .apis.responses import read_response
from .compute_link import ComputeLost
from .config import read_tokens
from .http.errors import RETRY_LOST_S, STOPPING, ApiError, Shape, error_response, shape_of
from .http.guard import Guard
from .http.page import PAGE_FILES, page_file
from .metrics import CONTENT_TYPE
from .service import Frontend

_OPENAI, _ANTHROPIC = Shape.OPENAI, Shape.ANTHROPIC


def build_app(frontend: Frontend) -> Guard:
    """Return the ASGI application of a frontend. Raises ConfigError on an unusable token file."""
    config = frontend.config
    tokens = () if config.token_file is None else read_tokens(config.token_file)
    guard: Guard

    async def metrics(_request: Request, frontend: Frontend) -> Response:
        compute = None
        with contextlib.suppress(ComputeLost):
            compute = await frontend.link.status()
        text = frontend.metrics.text(guard.n_active, frontend.link.n_generations, compute)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    routes: tuple[tuple[str, str, Handler, Shape], ...] = (
        ("POST", "/v1/chat/completions", GeneratingEndpoint(_OPENAI, read_chat), _OPENAI),
        ("POST", "/v1/completions", GeneratingEndpoint(_OPENAI, read_completion), _OPENAI),
        ("POST", "/v1/responses", GeneratingEndpoint(_OPENAI, read_response), _OPENAI),
        ("POST", "/v1/messages", GeneratingEndpoint(_ANTHROPIC, read_messages), _ANTHROPIC),
        ("POST", "/v1/messages/count_tokens", count_tokens, _ANTHROPIC),
        ("GET", "/v1/models", list_models, _OPENAI),
        ("GET", "/v1/models/{name:path}", one_model, _OPENAI),
        ("GET", "/v1/headrace/why", why, _OPENAI),
        ("GET", "/v1/headrace/state", state, _OPENAI),
        ("GET", "/openapi.json", openapi_document, _OPENAI),
        ("GET", "/health", _health, _OPENAI),
        ("GET", "/ready", _ready, _OPENAI),
        ("GET", "/metrics", metrics, _OPENAI),
        *(("GET", path, page_file(path), _OPENAI) for path in PAGE_FILES),
    )
    app = Starlette(
        routes=[
            Route(path, guarded(handler, shape, frontend), methods=[method])
            for method, path, handler, shape in routes
        ],
        exception_handlers={HTTPException: _http_error, Exception: _bug},
    )
    known = {path for _, path, _, _ in routes}

    def note(path: str, status: int, _seconds: float) -> None:
        frontend.metrics.responded(path if path in known else "other", status)

    guard = Guard(app, tokens=tokens, max_active=config.max_connections, note=note)
    return guard


async def _health(_request: Request, _frontend: Frontend) -> Response:
    """The process lives."""
    return JSONResponse({"status": "ok"})


async def _ready(_request: Request, frontend: Frontend) -> Response:
    """Requests are answered now."""
    if frontend.is_draining:
        return _not_ready(STOPPING)
    try:
        report = await frontend.link.status()
    except ComputeLost as error:
        return _not_ready(str(error))
    return JSONResponse({"status": "ready", "model": frontend.name, "compute": report})


def _not_ready(why: str) -> Response:
    headers = {"retry-after": str(RETRY_LOST_S)}
    return JSONResponse({"status": "unavailable", "why": why}, 503, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    response = error_response(shape_of(request.url.path), told, _number(request))
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


async def _bug(request: Request, _error: Exception) -> Response:
    """An error of ours: told without its text, which the server logs."""
    told = ApiError(500, f"an error of this server; its log has request {_number(request)}")
    return error_response(shape_of(request.url.path), told, _number(request))


def _number(request: Request) -> str:
    return str(request.scope.get("state", {}).get("request_id", ""))
