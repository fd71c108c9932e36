"""`headrace chat`: talk with the model, line by line.

A turn is the user marker and the line, the assistant marker, and the think marker (--think) or the
end-of-think marker; the answer ends at the end token. Text that was typed never becomes a marker.
Works on a terminal and with lines piped in. Thoughts of earlier turns are left out of the prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from compute.config import load_config
from compute.frontend.text_stream import TextStream
from protocol.errors import ConfigError

from .requests import (
    Answer,
    add_request_arguments,
    run_request,
    sampling_of,
    say_what_is_unused,
    stops_of,
)
from .terminal import Display, as_json, closing_line, interruptible

if TYPE_CHECKING:
    from compute.frontend.tokenizer import Tokenizer

    from .opening import Opened


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the system text, thinking, and the flags of a request."""
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before all else")
    parser.add_argument(
        "--think", action="store_true", help="let the model think before it answers"
    )
    add_request_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Answer line after line until the input ends; return the exit status."""
    from .opening import opened

    config = load_config(args, os.environ)
    sampling, stops = sampling_of(config, args), stops_of(args)
    display = Display(quiet=args.json)
    with opened(config, display) as ready:
        say_what_is_unused(ready, display)
        talk = Talk(ready.tokenizer, ready.bos_id, think=args.think, system=args.system)
        for line in _lines(ready, display):
            ids = talk.prompt(line)
            if len(ids) >= ready.engine.context:
                display.line(f"the talk has {len(ids)} tokens: over --context; it starts anew")
                talk.turns.clear()
                ids = talk.prompt(line)
            with interruptible() as cancelled:
                answer = run_request(
                    ready,
                    display,
                    ids,
                    sampling=sampling,
                    text=talk.text_stream(stops),
                    cancelled=cancelled,
                    logprobs=args.logprobs is not None,
                    show=not args.json,
                )
            talk.turns.append((line, answer.ids))
            _report(answer, ids, display, as_object=args.json)
    return 0


@dataclass(slots=True)
class Talk:
    """The turns so far, and the prompt that they make."""

    tokenizer: Tokenizer
    bos_id: int
    think: bool = False
    system: str | None = None
    turns: list[tuple[str, list[int]]] = field(default_factory=list)  # (line, answer's ids)

    def prompt(self, line: str) -> list[int]:
        """Return the ids of all turns and of `line`, up to where the answer begins.

        Raises ConfigError where the tokenizer lacks a marker.
        """
        opening = self._marker("think" if self.think else "think_end")
        ids = [self.bos_id]
        if self.system is not None:
            ids += [self._marker("system"), *self.tokenizer.encode(self.system)]
        for earlier, answer in self.turns:
            ids += self._said(earlier)
            ids += [self._marker("think_end"), *self._without_thought(answer)]
        return [*ids, *self._said(line), opening]

    def text_stream(self, stops: tuple[str, ...]) -> TextStream:
        """Return a decoder that spells the markers while the model thinks."""
        return TextStream(self.tokenizer, stops, special=self.think)

    def _said(self, line: str) -> list[int]:
        text = self.tokenizer.encode(line)
        return [self._marker("user"), *text, self._marker("assistant")]

    def _without_thought(self, answer: list[int]) -> list[int]:
        end = self._marker("think_end")
        kept = answer[answer.index(end) + 1 :] if self.think and end in answer else answer
        stop = self._marker("end")
        return kept if kept[-1:] == [stop] else [*kept, stop]

    def _marker(self, name: str) -> int:
        marker: int | None = getattr(self.tokenizer.special, name)
        if marker is None:
            raise ConfigError(f"the model's tokenizer has no {name} marker: it cannot chat")
        return marker


def _lines(ready: Opened, display: Display) -> Iterator[str]:
    """Yield what the user says; on a terminal with editing and a prompt."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  input() edits lines with it

        display.line("Ctrl-D ends the talk, Ctrl-C the answer.")
    while True:
        try:
            with ready.engine.source.idle():
                line = input("> ") if sys.stdin.isatty() else _piped_line()
        except EOFError:
            return
        except KeyboardInterrupt:
            display.line("")
            continue
        if line.strip():
            yield line


def _piped_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _report(answer: Answer, ids: list[int], display: Display, *, as_object: bool) -> None:
    if as_object:
        found: dict[str, object] = {"prompt_ids": ids, "ids": answer.ids, "text": answer.text}
        sys.stdout.write(json.dumps(found | as_json(answer.finished)) + "\n")
        sys.stdout.flush()
        return
    display.text("" if answer.text.endswith("\n") else "\n")
    display.line(closing_line(answer.finished))
