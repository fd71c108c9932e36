"""`/v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from compute.frontend.answer import Answer, Piece, TokenChance
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
from compute.frontend.http.event_stream import sse
from compute.frontend.service import Frontend, new_id

from .chances import chat_chances
from .endpoint import Reading
from .fields import Fields
from .sampling import read_draw, read_top_logprobs
from .usage import chat_usage

LIMITS = ("max_completion_tokens", "max_tokens")


def read_chat(fields: Fields, frontend: Frontend) -> Reading:
    """Read a Chat Completions request. Raises ApiError."""
    fields.only_one("n")
    for name, why in (
        ("functions", "send tools instead"),
        ("function_call", "send tool_choice instead"),
        ("audio", "this model has no sound"),
        ("web_search_options", "this server searches nothing"),
    ):
        fields.refuse(name, why)
    wants_chances = fields.flag("logprobs")
    top = read_top_logprobs(fields)
    if top and not wants_chances:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    draw = read_draw(
        fields, frontend.config, limits=LIMITS, logprobs=wants_chances, top_logprobs=top
    )
    include_usage = Fields(fields.mapping("stream_options")).flag("include_usage")
    return Reading(
        make_prompt=lambda context: frontend.encoding.chat(fields.body, context),
        draw=draw,
        writer=ChatWriter(frontend, wants_chances=wants_chances, include_usage=include_usage),
        stops=fields.stops("stop"),
        stream=fields.flag("stream"),
    )


class ChatWriter:
    """Writes a chat.completion, or its chunks."""

    def __init__(self, frontend: Frontend, *, wants_chances: bool, include_usage: bool) -> None:
        self.id = new_id("chatcmpl-")
        self._frontend = frontend
        self._wants_chances = wants_chances
        self._include_usage = include_usage
        self._created = int(time.time())
        self._call_ids: dict[int, str] = {}

    def whole(self, pieces: list[Piece], answer: Answer) -> dict[str, Any]:
        """Return the chat.completion."""
        events = [event for piece in pieces for event in piece.events]
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
        calls = [self._call(event) for event in events if isinstance(event, CallEnded)]
        if text or not calls:
            message["content"] = text
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        chances = [chance for piece in pieces for chance in piece.chances]
        assert answer.finished is not None
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._chances(chances),
            "finish_reason": answer.finished.reason,
        }
        return self._head("chat.completion") | {"choices": [choice], "usage": chat_usage(answer)}

    def opening(self, answer: Answer) -> Iterable[bytes]:  # noqa: ARG002 - as all writers
        """Return the first chunk."""
        yield self._chunk({"role": "assistant", "content": ""})

    def events(self, piece: Piece, answer: Answer) -> Iterable[bytes]:
        """Return a chunk for each event; the piece's log-probabilities go with the first."""
        chances = self._chances(piece.chances) if piece.chances else None
        for event in piece.events:
            if isinstance(event, Finished):
                break
            for delta in self._deltas(event):
                yield self._chunk(delta, chances=chances)
                chances = None
        if chances is not None:
            yield self._chunk({"content": ""}, chances=chances)
        if answer.finished is not None:
            yield from self._ending(answer, answer.finished)

    def error(self, error: ApiError) -> Iterable[bytes]:
        """Return the error as an event."""
        yield sse(error_body(Shape.OPENAI, error, self.id))
        yield sse("[DONE]")

    def _ending(self, answer: Answer, finished: Finished) -> Iterator[bytes]:
        yield self._chunk({}, finish_reason=finished.reason)
        if self._include_usage:
            head = self._head("chat.completion.chunk")
            yield sse(head | {"choices": [], "usage": chat_usage(answer)})
        yield sse("[DONE]")

    def _deltas(self, event: Event) -> Iterator[dict[str, Any]]:
        if isinstance(event, TextDelta):
            yield {"content": event.text}
        elif isinstance(event, ReasoningDelta):
            yield {"reasoning_content": event.text}
        elif isinstance(event, CallStarted):
            function = {"name": event.name, "arguments": ""}
            call = {"id": self._call_id(event.index), "type": "function", "function": function}
            yield {"tool_calls": [{"index": event.index, **call}]}
        elif isinstance(event, ArgumentsDelta):
            more = {"index": event.index, "function": {"arguments": event.text}}
            yield {"tool_calls": [more]}

    def _chunk(
        self,
        delta: dict[str, Any],
        *,
        chances: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": chances,
            "finish_reason": finish_reason,
        }
        return sse(self._head("chat.completion.chunk") | {"choices": [choice]})

    def _call(self, event: CallEnded) -> dict[str, Any]:
        function = {"name": event.name, "arguments": event.arguments}
        return {"id": self._call_id(event.index), "type": "function", "function": function}

    def _call_id(self, index: int) -> str:
        return self._call_ids.setdefault(index, new_id("call_"))

    def _chances(self, chances: list[TokenChance]) -> dict[str, Any] | None:
        if not self._wants_chances:
            return None
        return {"content": chat_chances(chances, self._frontend.tokenizer), "refusal": None}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._frontend.name,
            "system_fingerprint": self._frontend.fingerprint,
        }
