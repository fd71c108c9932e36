"""Golden cases of prompts and outputs, the demo's tokenizer, and events put together again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from compute.frontend.encoding import (
    ArgumentsDelta,
    CallEnded,
    CallStarted,
    Event,
    Finished,
    OutputParser,
    Prompt,
    ReasoningDelta,
    Start,
    TextDelta,
)
from compute.frontend.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "demo" / "tokenizer.json"
DSML = "\uff5cDSML\uff5c"
BEGIN = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
SYSTEM, USER, ASSISTANT = "<\uff5cSystem\uff5c>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"
EFFORT = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)"
EFFORT_75 = SYSTEM + EFFORT.format(75) + "\n\n"


def golden(name: str) -> list[dict[str, Any]]:
    """The cases of one file of tests/data/encoding."""
    cases = json.loads((ROOT / "tests" / "data" / "encoding" / name).read_text())
    assert isinstance(cases, list)
    return cases


@cache
def demo_tokenizer() -> Tokenizer:
    return Tokenizer.load(ROOT / "demo")


def tokenizer_without(*markers: str) -> Tokenizer:
    """The demo's tokenizer in which `markers` are no tokens; all are meant by none."""
    raw = json.loads(TOKENIZER.read_text())
    gone = markers or [token["content"] for token in raw["added_tokens"]]
    raw["added_tokens"] = [item for item in raw["added_tokens"] if item["content"] not in gone]
    vocabulary = raw["model"]["vocab"]
    for number, marker in enumerate(gone):
        vocabulary[f"\u0100unused{number}"] = vocabulary.pop(marker)
    return Tokenizer(Backend.from_str(json.dumps(raw)))


def marked(text: str) -> list[int]:
    """Ids of an output in which every spelled marker is the real one."""
    return demo_tokenizer().encode(text, markers=True)


def special_ranges(prompt: Prompt) -> list[list[int]]:
    """Code point ranges of the prompt's markers."""
    ranges, place = [], 0
    for text, special in prompt.spans:
        if special:
            ranges.append([place, place + len(text)])
        place += len(text)
    return ranges


@dataclass
class Call:
    name: str
    streamed: str = ""
    arguments: str = ""
    complete: bool | None = None


@dataclass
class Answer:
    """What the events of one answer add up to."""

    reasoning: str = ""
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    finish: str | None = None
    stop: str | None = None

    def as_golden(self) -> dict[str, Any]:
        calls = [{"name": call.name, "arguments": call.arguments} for call in self.calls]
        finish = {"finish": self.finish}
        return {"reasoning": self.reasoning, "content": self.text, "tool_calls": calls} | finish


def answer_of(events: Iterable[Event]) -> Answer:
    """Put the events together; each is checked to be in its place."""
    answer = Answer()
    for event in events:
        assert answer.finish is None, "an event after Finished"
        match event:
            case ReasoningDelta(text):
                assert not answer.text and not answer.calls
                answer.reasoning += text
            case TextDelta(text):
                assert not answer.calls
                answer.text += text
            case CallStarted(index, name):
                assert index == len(answer.calls)
                assert all(call.complete for call in answer.calls)
                answer.calls.append(Call(name))
            case ArgumentsDelta(index, text):
                assert index == len(answer.calls) - 1 and answer.calls[index].complete is None
                answer.calls[index].streamed += text
            case CallEnded(index, name, arguments, complete):
                call = answer.calls[index]
                assert call.name == name and call.complete is None
                call.arguments, call.complete = arguments, complete
            case Finished(reason, stop):
                answer.finish, answer.stop = reason, stop
    assert all(call.complete is not None for call in answer.calls)
    return answer


def read(
    ids: Sequence[int],
    start: Start = Start.TEXT,
    *,
    cut: bool = False,
    pieces: Sequence[int] = (),
    parse_calls: bool = True,
    stops: Sequence[str] = (),
) -> Answer:
    """The answer that `ids` add up to, fed in bursts that end at `pieces`."""
    parser = OutputParser(demo_tokenizer(), start, parse_calls=parse_calls, stops=stops)
    events: list[Event] = []
    edges = [0, *pieces, len(ids)]
    for begin, end in pairwise(edges):
        events += parser.feed(ids[begin:end])
    return answer_of([*events, *parser.finish(cut=cut)])
