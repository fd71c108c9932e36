"""What generate and chat share: flags of one request, and running it with its display."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from compute.config import (
    DAEMON_OPTIONS,
    MODEL_OPTIONS,
    SAMPLING_OPTIONS,
    ComputeConfig,
    add_config_arguments,
)
from compute.frontend.text_stream import TextStream
from compute.sampler import Choice, Sampling
from protocol.errors import ConfigError

from .opening import Opened
from .terminal import Display

if TYPE_CHECKING:
    from compute.session import Finished


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of model, daemon, sampling, stop strings and JSON."""
    add_config_arguments(parser, MODEL_OPTIONS + DAEMON_OPTIONS + SAMPLING_OPTIONS)
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; repeatable",
    )
    parser.add_argument(
        "--logprobs", type=int, metavar="N", help="with --json: log-probabilities, and N likeliest"
    )
    parser.add_argument("--json", action="store_true", help="print one object as the last line")


def sampling_of(config: ComputeConfig, args: argparse.Namespace) -> Sampling:
    """Return how ids are chosen; without a seed a fresh one."""
    return Sampling(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        seed=secrets.randbits(32) if config.seed is None else config.seed,
        top_logprobs=args.logprobs or 0,
    )


def stops_of(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the stop strings; raises ConfigError for an empty one."""
    if any(not stop for stop in args.stop):
        raise ConfigError("--stop: a stop string is empty")
    return tuple(args.stop)


def say_what_is_unused(opened: Opened, display: Display) -> None:
    """Say so where settings of a daemon were given and one runs that was not started here."""
    config = opened.config
    if opened.daemon.child is None and config.arena is not None:
        place = opened.daemon.runtime_dir
        display.line(f"a daemon runs in {place} already: its own --arena holds, not this one")


@dataclass(slots=True)
class Answer:
    """What a request brought."""

    finished: Finished
    choices: list[Choice] = field(default_factory=list)
    text: str = ""

    @property
    def ids(self) -> list[int]:
        """The new ids, a stop id included."""
        return [choice.id for choice in self.choices]


def run_request(
    opened: Opened,
    display: Display,
    prompt_ids: Sequence[int],
    *,
    sampling: Sampling,
    text: TextStream,
    cancelled: Callable[[], bool],
    logprobs: bool = False,
    show: bool = True,
) -> Answer:
    """Run one request, its text shown as it comes, and return what it brought."""
    from compute.session import Finished, NewToken, Prefilled, Request

    request = Request(
        prompt_ids,
        sampling,
        max_tokens=opened.config.max_tokens,
        stop_ids=opened.stop_ids,
        text=text,
        logprobs=logprobs,
        cancelled=cancelled,
    )
    choices: list[Choice] = []
    pieces: list[str] = []
    try:
        for event in opened.engine.generate(request):
            if isinstance(event, Prefilled):
                display.prefilled(event)
                continue
            if isinstance(event, NewToken):
                choices.append(event.choice)
            pieces.append(event.text)
            if show:
                display.text(event.text)
    finally:
        display.end_bar()
    assert isinstance(event, Finished)
    return Answer(event, choices, "".join(pieces))
