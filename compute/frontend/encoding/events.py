"""What the model's output turns out to be, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A tool call begins."""

    index: int  # 0, 1, ... in the answer
    name: str  # as the model wrote it, a namespace included


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A tool call is over.

    arguments   of a complete call always the text of a JSON object, each name once. The joined
                deltas are the same text; only where the model gave a name twice do they hold both,
                and every reader of JSON then takes the last, as `arguments` does.
                Of an incomplete call what there is: never a whole JSON text.
    """

    index: int
    name: str
    arguments: str
    complete: bool


@dataclass(frozen=True, slots=True)
class Finished:
    """The output is over; nothing follows."""

    reason: str  # "stop", "length" or "tool_calls"
    stop: str | None = None  # the stop string that ended the text


Delta: TypeAlias = ReasoningDelta | TextDelta | ArgumentsDelta
Event: TypeAlias = Delta | CallStarted | CallEnded | Finished


def merged(events: Iterable[Event]) -> list[Event]:
    """Return `events` with neighbouring deltas of one kind made one, and empty ones left out."""
    kept: list[Event] = []
    for event in events:
        if isinstance(event, Delta):
            last = kept[-1] if kept else None
            if not event.text:
                continue
            if isinstance(last, Delta) and replace(last, text="") == replace(event, text=""):
                kept[-1] = replace(last, text=last.text + event.text)
                continue
        kept.append(event)
    return kept
