"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from compute.frontend.answer import Answer, Piece
from compute.frontend.encoding import (
    ArgumentsDelta,
    CallEnded,
    CallStarted,
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
)
from compute.frontend.http.errors import ApiError, Shape, error_body
from compute.frontend.http.event_stream import sse, while_connected
from compute.frontend.service import Frontend, new_id

from .endpoint import Reading, body_of
from .fields import Fields
from .sampling import read_draw
from .usage import messages_usage

LIMITS = ("max_tokens",)
PING = sse({"type": "ping"}, "ping")
_SIGNATURE = "headrace"  # clients send it back with the thinking; it proves nothing here
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def read_messages(fields: Fields, frontend: Frontend) -> Reading:
    """Read a Messages request. Raises ApiError."""
    if not fields.has("max_tokens"):
        raise ApiError(400, "max_tokens: is missing", param="max_tokens")
    return Reading(
        make_prompt=lambda context: frontend.encoding.messages(fields.body, context),
        draw=read_draw(fields, frontend.config, limits=LIMITS),
        writer=MessagesWriter(frontend),
        stops=fields.stops("stop_sequences"),
        stream=fields.flag("stream"),
        keep_alive=PING,
    )


async def count_tokens(request: Request, frontend: Frontend) -> Response:
    """Answer how many tokens the prompt of a request has."""
    body = await body_of(request, frontend)
    work = frontend.off_loop(frontend.encoding.messages, body)
    prompt = await while_connected(request.receive, work)
    return JSONResponse({"input_tokens": len(prompt.ids)})


class MessagesWriter:
    """Writes a message, or its events: blocks of thinking, text and tool use, one at a time."""

    def __init__(self, frontend: Frontend) -> None:
        self.id = new_id("msg_")
        self._frontend = frontend
        self._n_blocks = 0
        self._open = ""  # type of the block that is open

    def whole(self, pieces: list[Piece], answer: Answer) -> dict[str, Any]:
        """Return the message."""
        content: list[dict[str, Any]] = []
        for piece in pieces:
            for event in piece.events:
                _add(content, event)
        assert answer.finished is not None
        return (
            self._message()
            | {"content": content or [_text_block("")], "usage": messages_usage(answer)}
            | _ending(answer.finished)
        )

    def opening(self, answer: Answer) -> Iterable[bytes]:
        """Return message_start and a ping."""
        usage = messages_usage(answer)
        yield _event("message_start", message=self._message() | {"content": [], "usage": usage})
        yield PING

    def events(self, piece: Piece, answer: Answer) -> Iterable[bytes]:
        """Return the events of a piece."""
        for event in piece.events:
            yield from self._block_events(event)
        if answer.finished is not None:
            yield from self._close()
            usage = messages_usage(answer)
            yield _event("message_delta", delta=_ending(answer.finished), usage=usage)
            yield _event("message_stop")

    def error(self, error: ApiError) -> Iterable[bytes]:
        """Return the error event."""
        yield sse(error_body(Shape.ANTHROPIC, error, self.id), "error")

    def _block_events(self, event: Event) -> Iterator[bytes]:
        if isinstance(event, ReasoningDelta):
            yield from self._into("thinking", {"thinking": "", "signature": ""})
            yield self._delta("thinking_delta", thinking=event.text)
        elif isinstance(event, TextDelta):
            yield from self._into("text", {"text": ""})
            yield self._delta("text_delta", text=event.text)
        elif isinstance(event, CallStarted):
            yield from self._close()
            block = {"id": new_id("toolu_"), "name": event.name, "input": {}}
            yield from self._into("tool_use", block)
        elif isinstance(event, ArgumentsDelta):
            yield self._delta("input_json_delta", partial_json=event.text)
        elif isinstance(event, CallEnded):
            yield from self._close()

    def _into(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        """Open a block of this type where none is open."""
        if self._open == kind:
            return
        yield from self._close()
        self._open = kind
        block = {"type": kind, **block}
        yield _event("content_block_start", index=self._n_blocks, content_block=block)

    def _close(self) -> Iterator[bytes]:
        if not self._open:
            return
        if self._open == "thinking":
            yield self._delta("signature_delta", signature=_SIGNATURE)
        yield _event("content_block_stop", index=self._n_blocks)
        self._open = ""
        self._n_blocks += 1

    def _delta(self, kind: str, **fields: Any) -> bytes:
        delta = {"type": kind, **fields}
        return _event("content_block_delta", index=self._n_blocks, delta=delta)

    def _message(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._frontend.name,
            "stop_reason": None,
            "stop_sequence": None,
        }


def _add(content: list[dict[str, Any]], event: Event) -> None:
    """Add what an event brings to the blocks of a message."""
    last = content[-1] if content else {}
    if isinstance(event, ReasoningDelta):
        if last.get("type") == "thinking":
            last["thinking"] += event.text
        else:
            block = {"type": "thinking", "thinking": event.text, "signature": _SIGNATURE}
            content.append(block)
    elif isinstance(event, TextDelta):
        if last.get("type") == "text":
            last["text"] += event.text
        else:
            content.append(_text_block(event.text))
    elif isinstance(event, CallEnded):
        content.append(
            {
                "type": "tool_use",
                "id": new_id("toolu_"),
                "name": event.name,
                "input": _input(event),
            }
        )


def _input(event: CallEnded) -> Any:
    """The arguments of a call; of one that was cut off there is nothing to give."""
    return json.loads(event.arguments) if event.complete else {}


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _ending(finished: Finished) -> dict[str, Any]:
    if finished.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop}
    return {"stop_reason": _STOP_REASONS[finished.reason], "stop_sequence": None}


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)
