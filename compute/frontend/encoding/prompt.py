"""What a request becomes: token ids, and what the parser of the answer must know.

A rendered prompt is a list of spans. A special span is one marker that the template itself
printed; every other span is text that was written by somebody and is tokenised without the added
vocabulary. So a marker spelled in user text stays text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from protocol.errors import ConfigError

from .errors import RequestError

if TYPE_CHECKING:
    from compute.frontend.tokenizer import Tokenizer


class Start(Enum):
    """Where the model's output begins."""

    TEXT = "text"  # newlines that open it are dropped
    TEXT_CONTINUED = "text_continued"  # they are part of a text that goes on
    REASONING = "reasoning"
    REASONING_CONTINUED = "reasoning_continued"
    CALLS = "calls"  # inside a block of tool calls that the prompt opened


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the sampled text must match, for the grammar that compute applies to the logits.

    In thinking mode it binds what follows the reasoning. `tool_call` binds a call once one is
    opened, `tool_call_required` demands one.
    """

    kind: str  # "json", "regex", "tool_call" or "tool_call_required"
    schema: str  # JSON Schema or expression; "" is any JSON value; for calls a JSON list of tools


class Span(NamedTuple):
    """A piece of a rendered prompt."""

    text: str
    special: bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's prompt, ready for the engine."""

    ids: tuple[int, ...]
    spans: tuple[Span, ...]
    start: Start = Start.TEXT
    effort: int | None = None  # 1 .. 100; None where the model does not think
    parse_calls: bool = False  # False: a call block in the output is kept from the client
    constraint: Constraint | None = None
    stops: tuple[str, ...] = ()  # strings that end the text beside those that the request names
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # full -> parts

    @property
    def text(self) -> str:
        """The prompt as one string."""
        return "".join(span.text for span in self.spans)

    @property
    def thinking(self) -> bool:
        """Whether the model is asked to think first."""
        return self.effort is not None


def cut_spans(text: str, special: Iterable[tuple[int, int]]) -> list[Span]:
    """Return the spans of `text`, of which the half-open ranges `special` are markers."""
    spans, end = [], 0
    for start, stop in special:
        if start > end:
            spans.append(Span(text[end:start]))
        spans.append(Span(text[start:stop], special=True))
        end = stop
    if end < len(text):
        spans.append(Span(text[end:]))
    return spans


def token_ids(
    spans: Iterable[Span], tokenizer: Tokenizer, context: int | None = None
) -> tuple[int, ...]:
    """Return the ids of `spans`, each tokenised by itself.

    context   most ids of prompt and answer; spans that are surely too long are not tokenised

    Raises RequestError where the tokenizer lacks a marker that the prompt needs, for text that is
    no Unicode, and for spans that are surely too long.
    """
    spans = tuple(spans)
    if context is not None:
        _check_length(spans, tokenizer, context)
    ids: list[int] = []
    for text, special in spans:
        try:
            piece = tokenizer.encode(text, markers=special)
        except ConfigError as error:
            raise RequestError(str(error)) from None
        if special and len(piece) != 1:
            raise RequestError(f"the model's tokenizer has no marker {text}: it cannot read this")
        ids += piece
    return tuple(ids)


def _check_length(spans: Iterable[Span], tokenizer: Tokenizer, context: int) -> None:
    least = sum(1 if special else tokenizer.fewest_ids(text) for text, special in spans)
    if least >= context:
        raise RequestError(
            f"the prompt has at least {least} tokens; with at least one new token it does not fit "
            f"the context of {context}",
            param="messages",
            code="context_length_exceeded",
        )


def marker(tokenizer: Tokenizer, token_id: int | None) -> Span:
    """Return the marker `token_id` as a span; it must exist."""
    assert token_id is not None
    return Span(tokenizer.decode([token_id], special=True), special=True)


def opened(spans: tuple[Span, ...], tokenizer: Tokenizer) -> tuple[Span, ...]:
    """Return `spans` with the begin marker in front, where the tokenizer has one."""
    begin = tokenizer.special.begin
    return spans if begin is None else (marker(tokenizer, begin), *spans)


def output_start(ids: tuple[int, ...], tokenizer: Tokenizer) -> Start:
    """Return where the output begins after a prompt `ids` that opens no block of calls.

    The last think marker decides; text after it is a message that is being continued.
    """
    special = tokenizer.special
    last = {ids[-1]} if ids else set()
    after = ids[_last(ids, special.assistant) :]
    opened, closed = _last(after, special.think), _last(after, special.think_end)
    if opened > closed:
        return Start.REASONING if special.think in last else Start.REASONING_CONTINUED
    if closed and special.think_end not in last:
        return Start.TEXT_CONTINUED
    return Start.TEXT


def _last(ids: tuple[int, ...], wanted: int | None) -> int:
    """Place after the last `wanted`; 0 where there is none."""
    places = (place for place in range(len(ids), 0, -1) if ids[place - 1] == wanted)
    return next(places, 0)
