"""`/v1/responses`, the stateless part: nothing is stored, the whole talk comes as input."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from compute.frontend.answer import Answer, Piece
from compute.frontend.encoding import Prompt
from compute.frontend.http.errors import ApiError
from compute.frontend.http.event_stream import sse
from compute.frontend.service import Frontend

from .endpoint import Reading
from .fields import Fields
from .response_items import Items, Told
from .response_object import ResponseObject
from .sampling import read_draw, read_top_logprobs

LIMITS = ("max_output_tokens",)
_CHANCES = "message.output_text.logprobs"


def read_response(fields: Fields, frontend: Frontend) -> Reading:
    """Read a Responses request. Raises ApiError."""
    fields.refuse("background", "requests are answered while they run only")
    include = fields.body.get("include") or []
    if not isinstance(include, list):
        raise ApiError(400, "include: wanted a list", param="include")
    wants_chances = _CHANCES in include
    top = read_top_logprobs(fields)
    draw = read_draw(
        fields,
        frontend.config,
        limits=LIMITS,
        logprobs=wants_chances or top > 0,
        top_logprobs=top,
    )
    writer = ResponsesWriter(frontend, ResponseObject(fields, frontend, draw))

    def make_prompt(context: int) -> Prompt:
        prompt = frontend.encoding.responses(fields.body, context)
        writer.name_tools(prompt.namespaces)
        return prompt

    return Reading(
        make_prompt=make_prompt,
        draw=draw,
        writer=writer,
        stops=fields.stops("stop"),
        stream=fields.flag("stream"),
    )


class ResponsesWriter:
    """Writes a response, or its events, each with its number."""

    def __init__(self, frontend: Frontend, response: ResponseObject) -> None:
        self.id = response.id
        self._response = response
        self._items = Items(frontend.tokenizer)
        self._n_events = 0

    def name_tools(self, namespaces: Mapping[str, tuple[str, str]]) -> None:
        """Take which namespace and name a tool's full name stands for."""
        self._items.namespaces = namespaces

    def whole(self, pieces: list[Piece], answer: Answer) -> dict[str, Any]:
        """Return the response."""
        for piece in pieces:
            self._items.take(piece)
        self._end(answer)
        return self._response.ended(answer, self._items.done)

    def opening(self, answer: Answer) -> Iterable[bytes]:  # noqa: ARG002 - as all writers
        """Return response.created and response.in_progress."""
        running = self._response.running()
        yield self._event("response.created", {"response": running})
        yield self._event("response.in_progress", {"response": running})

    def events(self, piece: Piece, answer: Answer) -> Iterable[bytes]:
        """Return the events of a piece."""
        for kind, fields in self._items.take(piece):
            yield self._event(kind, fields)
        if answer.finished is not None:
            for kind, fields in self._end(answer):
                yield self._event(kind, fields)
            whole = self._response.ended(answer, self._items.done)
            yield self._event(f"response.{whole['status']}", {"response": whole})

    def error(self, error: ApiError) -> Iterable[bytes]:
        """Return an error event and response.failed."""
        code = error.code or ("invalid_prompt" if error.status < 500 else "server_error")
        said = {"code": code, "message": error.message, "param": error.param}
        yield self._event("error", said)
        failed = self._response.failed(error.message, code, self._items.done)
        yield self._event("response.failed", {"response": failed})

    def _end(self, answer: Answer) -> list[Told]:
        assert answer.finished is not None
        return self._items.end(cut=answer.finished.reason == "length")

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        number, self._n_events = self._n_events, self._n_events + 1
        return sse({"type": kind, "sequence_number": number, **fields}, kind)
