"""A request's body: read up to a limit, then JSON that nests no deeper than is allowed.

Python's own parser recurses, so depth is counted in the bytes before it is called.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from starlette.requests import Request

from .errors import ApiError

PART_S = 30.0  # the longest pause within a body

_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


async def read_object(request: Request, max_bytes: int, max_depth: int) -> dict[str, Any]:
    """Return the body, a JSON object. Raises ApiError, ClientDisconnect."""
    return parse_object(await read_body(request, max_bytes), max_depth)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the bytes of the body. Raises ApiError 413 beyond `max_bytes`."""
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated) > max_bytes:
        raise too_large(max_bytes)
    parts: list[bytes] = []
    n_bytes = 0
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(PART_S):
                part = await anext(stream, None)
        except TimeoutError:
            raise ApiError(408, f"the request body stopped coming for {PART_S:g} s") from None
        if part is None:
            return b"".join(parts)
        n_bytes += len(part)
        if n_bytes > max_bytes:
            raise too_large(max_bytes)
        parts.append(part)


def too_large(max_bytes: int) -> ApiError:
    """Return the error of a body that is too large."""
    return ApiError(413, f"the request body is larger than {max_bytes} bytes")


def parse_object(body: bytes, max_depth: int) -> dict[str, Any]:
    """Return the JSON object that `body` is. Raises ApiError."""
    if depth(body) > max_depth:
        raise ApiError(400, f"the request body is nested deeper than {max_depth} levels")
    try:
        value = json.loads(body.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the request body is not UTF-8: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the request body is not JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise ApiError(400, "the request body is not a JSON object")
    if b"\\u" in body:
        _refuse_lone_surrogates(value)
    return dict(value)


def depth(body: bytes) -> int:
    """Return how deep the brackets of a JSON text nest; those in strings do not count."""
    level = deepest = 0
    for bracket in _STRINGS.sub(b"", body).translate(None, _NOT_BRACKETS):
        if bracket in b"[{":
            level += 1
            deepest = max(deepest, level)
        else:
            level -= 1
    return deepest


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


def _refuse_lone_surrogates(value: Mapping[str, Any]) -> None:
    """Half a character, escaped, is JSON for Python but no text for anybody else."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, "the request body holds half a surrogate pair") from None
