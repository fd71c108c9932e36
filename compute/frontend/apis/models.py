"""`/v1/models`: the one model, described so that clients of either company read it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from compute.frontend.http.errors import ApiError
from compute.frontend.service import Frontend


async def list_models(_request: Request, frontend: Frontend) -> Response:
    """Answer the list of models."""
    name = frontend.name
    page = {"has_more": False, "first_id": name, "last_id": name}
    return JSONResponse({"object": "list", "data": [_model(frontend)], **page})


async def one_model(request: Request, frontend: Frontend) -> Response:
    """Answer what is known of a model; another's name is not found."""
    name = request.path_params["name"]
    if name != frontend.name:
        raise ApiError(
            404,
            f"there is no model {name!r} here, only {frontend.name!r}",
            param="model",
            code="model_not_found",
        )
    return JSONResponse(_model(frontend))


def _model(frontend: Frontend) -> dict[str, Any]:
    began = datetime.fromtimestamp(frontend.started, UTC)
    joined = frontend.link.joined
    return {
        "id": frontend.name,
        "object": "model",
        "created": frontend.started,
        "owned_by": "headrace",
        "type": "model",
        "display_name": frontend.name,
        "created_at": began.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_model_len": None if joined is None else joined.context,
    }
