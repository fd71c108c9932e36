"""`/v1/completions`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from compute.frontend.answer import Answer, Piece, TokenChance
from compute.frontend.encoding import TextDelta
from compute.frontend.http.errors import ApiError, Shape, error_body
from compute.frontend.http.event_stream import sse
from compute.frontend.service import Frontend, new_id

from .chances import completion_chances
from .endpoint import Reading
from .fields import Fields
from .sampling import MAX_TOP_LOGPROBS, read_draw
from .usage import chat_usage

DEFAULT_TOKENS = 16  # as the API has it
LIMITS = ("max_tokens", "max_completion_tokens")


def read_completion(fields: Fields, frontend: Frontend) -> Reading:
    """Read a Completions request. Raises ApiError."""
    fields.only_one("n", "best_of")
    fields.refuse("echo", "the prompt is not sent back")
    fields.refuse("suffix", "this model cannot fill a gap")
    if not fields.has("prompt"):
        raise ApiError(400, "prompt: is missing", param="prompt")
    top = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)
    draw = read_draw(
        fields,
        frontend.config,
        limits=LIMITS,
        logprobs=top is not None,
        top_logprobs=top or 0,
        default_tokens=DEFAULT_TOKENS,
    )
    include_usage = Fields(fields.mapping("stream_options")).flag("include_usage")
    return Reading(
        make_prompt=lambda context: frontend.encoding.completion(fields.body["prompt"], context),
        draw=draw,
        writer=CompletionWriter(
            frontend, wants_chances=top is not None, include_usage=include_usage
        ),
        stops=fields.stops("stop"),
        stream=fields.flag("stream"),
        plain=True,
    )


class CompletionWriter:
    """Writes a text_completion, or its parts."""

    def __init__(self, frontend: Frontend, *, wants_chances: bool, include_usage: bool) -> None:
        self.id = new_id("cmpl-")
        self._frontend = frontend
        self._wants_chances = wants_chances
        self._include_usage = include_usage
        self._created = int(time.time())
        self._n_characters = 0  # of tokens whose log-probabilities were written

    def whole(self, pieces: list[Piece], answer: Answer) -> dict[str, Any]:
        """Return the text_completion."""
        chances = [chance for piece in pieces for chance in piece.chances]
        assert answer.finished is not None
        choice = self._choice("".join(map(_text, pieces)), chances, answer.finished.reason)
        return self._head() | {"choices": [choice], "usage": chat_usage(answer)}

    def opening(self, answer: Answer) -> Iterable[bytes]:  # noqa: ARG002 - as all writers
        """Return nothing: the first part comes with the first token."""
        return ()

    def events(self, piece: Piece, answer: Answer) -> Iterable[bytes]:
        """Return a part for each piece."""
        text = _text(piece)
        if text or piece.chances:
            yield sse(self._head() | {"choices": [self._choice(text, piece.chances, None)]})
        if answer.finished is not None:
            last = self._choice("", [], answer.finished.reason)
            yield sse(self._head() | {"choices": [last]})
            if self._include_usage:
                yield sse(self._head() | {"choices": [], "usage": chat_usage(answer)})
            yield sse("[DONE]")

    def error(self, error: ApiError) -> Iterable[bytes]:
        """Return the error as an event."""
        yield sse(error_body(Shape.OPENAI, error, self.id))
        yield sse("[DONE]")

    def _choice(
        self, text: str, chances: list[TokenChance], finish_reason: str | None
    ) -> dict[str, Any]:
        logprobs = None
        if self._wants_chances and (chances or finish_reason is None):
            tokenizer = self._frontend.tokenizer
            logprobs = completion_chances(chances, tokenizer, self._n_characters)
            self._n_characters += sum(map(len, logprobs["tokens"]))
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self._created,
            "model": self._frontend.name,
            "system_fingerprint": self._frontend.fingerprint,
        }


def _text(piece: Piece) -> str:
    return "".join(event.text for event in piece.events if isinstance(event, TextDelta))
