"""What the generating endpoints share: from a request's body to its answer, whole or streamed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from compute.frontend.answer import Answer, Moved, Piece
from compute.frontend.encoding import Prompt
from compute.frontend.followed import Followed
from compute.frontend.http.errors import ApiError, Shape, api_error, error_response
from compute.frontend.http.event_stream import EventStream, comment, while_connected
from compute.frontend.http.json_body import read_object
from compute.frontend.service import Asked, Frontend
from protocol.errors import HeadraceError

from .fields import Fields
from .sampling import Draw

POSITION_HEADER = "x-headrace-queue-position"
Handler = Callable[[Request, Frontend], Awaitable[Response]]


class Writer(Protocol):
    """Writes one answer as its API has it; used for one of the two ways only."""

    id: str

    def whole(self, pieces: list[Piece], answer: Answer) -> dict[str, Any]:
        """Return the answer at once."""

    def opening(self, answer: Answer) -> Iterable[bytes]:
        """Return the events before anything was generated."""

    def events(self, piece: Piece, answer: Answer) -> Iterable[bytes]:
        """Return the events of a piece; the last one also ends the stream."""

    def error(self, error: ApiError) -> Iterable[bytes]:
        """Return the events that end a stream badly."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A request body, read."""

    make_prompt: Callable[[int], Prompt]  # for a context; may take long; raises RequestError
    draw: Draw
    writer: Writer
    stops: tuple[str, ...] = ()
    stream: bool = False
    plain: bool = False  # a completion: the output is one text
    keep_alive: bytes = field(default_factory=lambda: comment("still here"))


class GeneratingEndpoint:
    """An endpoint that reads a body and generates.

    read   makes a Reading of the body's fields; raises ApiError, RequestError
    """

    def __init__(self, shape: Shape, read: Callable[[Fields, Frontend], Reading]) -> None:
        self._shape = shape
        self._read = read

    async def __call__(self, request: Request, frontend: Frontend) -> Response:
        """Answer one request."""
        reading = self._read(Fields(await body_of(request, frontend)), frontend)
        answer = await while_connected(request.receive, _begun(reading, frontend))
        headers = {POSITION_HEADER: str(answer.position)}
        steps = frontend.followed(answer, reading.writer.id, request.url.path)
        if reading.stream:
            return EventStream(
                _events(reading.writer, answer, steps),
                write_timeout_s=frontend.config.write_timeout_s,
                at_end=steps.aclose,
                keep_alive=reading.keep_alive,
                headers=headers,
            )
        async with contextlib.aclosing(steps):
            pieces = await while_connected(request.receive, _pieces(steps))
        return JSONResponse(reading.writer.whole(pieces, answer), headers=headers)


async def body_of(request: Request, frontend: Frontend) -> dict[str, Any]:
    """Return a request's body. Raises ApiError."""
    config = frontend.config
    return await read_object(request, config.max_body, config.max_depth)


def guarded(
    handler: Handler, shape: Shape, frontend: Frontend
) -> Callable[..., Awaitable[Response]]:
    """Return an endpoint whose errors are answers in its API's shape."""

    async def endpoint(request: Request) -> Response:
        number = str(request.scope["state"]["request_id"])
        try:
            return await handler(request, frontend)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except ApiError as error:
            return error_response(shape, error, number)
        except HeadraceError as error:
            return error_response(shape, api_error(error), number)

    return endpoint


async def _begun(reading: Reading, frontend: Frontend) -> Answer:
    asked: Asked = await frontend.asked(
        reading.make_prompt, reading.draw, reading.stops, plain=reading.plain
    )
    return await frontend.begin(asked)


async def _pieces(steps: Followed) -> list[Piece]:
    return [step async for step in steps if isinstance(step, Piece)]


async def _events(writer: Writer, answer: Answer, steps: Followed) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(steps):
        for event in writer.opening(answer):
            yield event
        if answer.position:
            yield _place(answer.position)
        try:
            async for step in steps:
                if isinstance(step, Moved):
                    yield _place(step.position)
                else:
                    for event in writer.events(step, answer):
                        yield event
        except ApiError as error:
            for event in writer.error(error):
                yield event
        except HeadraceError as error:
            for event in writer.error(api_error(error)):
                yield event


def _place(position: int) -> bytes:
    return comment(f"queue position {position}")
