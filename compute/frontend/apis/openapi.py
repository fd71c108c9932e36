"""`/openapi.json`: what the endpoints take and give, for tools that read such documents."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from compute.frontend.recent import MAX_REMEMBERED
from compute.frontend.service import Frontend

from .fields import MAX_STOPS
from .sampling import MAX_TOP_LOGPROBS

VERSION = "1"
_TEXT = {"type": "string"}
_FLAG = {"type": "boolean"}
_OBJECT = {"type": "object"}
_COUNT = {"type": "integer", "minimum": 1, "maximum": 1 << 30}
_CONTENT = {"anyOf": [_TEXT, {"type": "array", "items": _OBJECT}]}
_STOPS = {
    "anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": MAX_STOPS}],
}
_TOOLS = {"type": "array", "items": _OBJECT}
_DRAW: dict[str, Any] = {
    "model": _TEXT,
    "stream": _FLAG,
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "minimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": -1},
    "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "seed": {"type": "integer"},
}
_OPENAI_DRAW: dict[str, Any] = _DRAW | {
    "stop": _STOPS,
    "n": {"type": "integer", "enum": [1]},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "logit_bias": {"type": "object", "additionalProperties": {"type": "number"}},
    "stream_options": {"type": "object", "properties": {"include_usage": _FLAG}},
}
_TOP = {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS}


def _message(*roles: str) -> dict[str, Any]:
    return {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "properties": {"role": {"enum": list(roles)}, "content": _CONTENT},
            "required": ["role", "content"],
        },
    }


_CHAT = _OPENAI_DRAW | {
    "messages": _message("system", "developer", "user", "assistant", "tool"),
    "max_completion_tokens": _COUNT,
    "max_tokens": _COUNT,
    "logprobs": _FLAG,
    "top_logprobs": _TOP,
    "reasoning_effort": {"anyOf": [_TEXT, {"type": "integer", "minimum": 1, "maximum": 100}]},
    "response_format": _OBJECT,
    "tools": _TOOLS,
    "tool_choice": {"anyOf": [_TEXT, _OBJECT]},
}
_COMPLETION = _OPENAI_DRAW | {
    "prompt": {
        "anyOf": [_TEXT, {"type": "array", "items": {"type": "integer"}, "minItems": 1}],
    },
    "max_tokens": _COUNT,
    "logprobs": _TOP,
}
_RESPONSE = _DRAW | {
    "input": {"anyOf": [_TEXT, {"type": "array", "items": _OBJECT}]},
    "instructions": _TEXT,
    "max_output_tokens": _COUNT,
    "reasoning": _OBJECT,
    "text": _OBJECT,
    "tools": _TOOLS,
    "tool_choice": {"anyOf": [_TEXT, _OBJECT]},
    "top_logprobs": _TOP,
    "include": {"type": "array", "items": _TEXT},
}
_MESSAGES = _DRAW | {
    "messages": _message("user", "assistant"),
    "max_tokens": _COUNT,
    "system": _CONTENT,
    "stop_sequences": {"type": "array", "items": _TEXT, "maxItems": MAX_STOPS},
    "thinking": _OBJECT,
    "tools": _TOOLS,
    "tool_choice": _OBJECT,
}
_STATUSES = {
    "400": "The request cannot be answered as it is",
    "401": "A bearer token is needed",
    "403": "The Host header names another machine",
    "408": "The body did not come",
    "413": "The body is too large",
    "429": "The queue is full: try again after Retry-After",
    "500": "A weight file cannot be read, or an error of this server",
    "501": "The server lacks a package that the request needs",
    "503": "The model is not there now: try again after Retry-After",
    "504": "The request took longer than allowed",
}


async def openapi_document(_request: Request, frontend: Frontend) -> Response:
    """Answer the document."""
    return JSONResponse(document(frontend.name))


def document(name: str) -> dict[str, Any]:
    """Return the OpenAPI document of a server for the model `name`."""
    return {
        "openapi": "3.1.0",
        "info": {"title": f"headrace: {name}", "version": VERSION},
        "paths": {
            "/v1/chat/completions": _post("chat completion", _CHAT, "messages"),
            "/v1/completions": _post("completion", _COMPLETION, "prompt"),
            "/v1/responses": _post("response", _RESPONSE, "input"),
            "/v1/messages": _post("message", _MESSAGES, "messages", "max_tokens"),
            "/v1/messages/count_tokens": _post("tokens of a prompt", _MESSAGES, "messages"),
            "/v1/models": _get("the models"),
            "/v1/headrace/why": _get("where the time of the last requests went", last=True),
            "/v1/headrace/state": _get("what the server does now", last=True),
            "/health": _get("whether the process lives"),
            "/ready": _get("whether requests are answered now", "503"),
        },
        "components": {"securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
        "security": [{"bearer": []}, {}],
    }


def _post(what: str, properties: dict[str, Any], *required: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    event = {"type": "object", "properties": {"event": _TEXT, "data": _TEXT}, "required": ["data"]}
    answers = {"application/json": {"schema": _OBJECT}, "text/event-stream": {"schema": event}}
    responses: dict[str, Any] = {"200": {"description": what, "content": answers}}
    for status, text in _STATUSES.items():
        responses[status] = {
            "description": text,
            "content": {"application/json": {"schema": _OBJECT}},
        }
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"post": {"summary": what, "requestBody": body, "responses": responses}}


def _get(what: str, *statuses: str, last: bool = False) -> dict[str, Any]:
    content = {"application/json": {"schema": _OBJECT}}
    responses: dict[str, Any] = {"200": {"description": what, "content": content}}
    for status in ("401", "403", *statuses, *(["400"] if last else [])):
        responses[status] = {"description": _STATUSES[status], "content": content}
    found: dict[str, Any] = {"summary": what, "responses": responses}
    if last:
        number = {"type": "integer", "minimum": 1, "maximum": MAX_REMEMBERED}
        found["parameters"] = [{"name": "last", "in": "query", "schema": number}]
    return {"get": found}
