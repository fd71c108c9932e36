"""`headrace generate`: write text that follows a prompt.

Compute runs in this process; the experts come from the daemon that runs already or from one that
is started for the while. Standard output carries the new text, or with --json one object.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys

from compute.config import load_config
from protocol.errors import ConfigError
from protocol.lists import split_list

from .requests import (
    Answer,
    add_request_arguments,
    run_request,
    sampling_of,
    say_what_is_unused,
    stops_of,
)
from .terminal import Display, as_json, closing_line, interruptible

EXIT_INTERRUPTED = 128 + signal.SIGINT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the prompt and the flags of a request."""
    parser.add_argument(
        "prompt", nargs="?", help="text to go on from; - or nothing: standard input"
    )
    parser.add_argument(
        "--prompt-ids", metavar="1,2,3", help="token ids instead of a text, as given"
    )
    parser.add_argument(
        "--markers", action="store_true", help="markers spelled in the prompt become special tokens"
    )
    add_request_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Generate once and return the exit status."""
    from compute.frontend.text_stream import TextStream

    from .opening import opened

    config = load_config(args, os.environ)
    sampling, stops = sampling_of(config, args), stops_of(args)
    given = parse_ids(args.prompt_ids) if args.prompt_ids is not None else None
    if given is not None and args.prompt is not None:
        raise ConfigError("both a prompt and --prompt-ids were given; one of them is wanted")
    prompt = _prompt(args.prompt) if given is None else ""
    display = Display(quiet=args.json)
    with opened(config, display) as ready:
        say_what_is_unused(ready, display)
        ids = given
        if ids is None:
            ids = ready.tokenizer.encode(prompt, markers=args.markers)
            ids = ids if ids[:1] == [ready.bos_id] else [ready.bos_id, *ids]
        with interruptible() as cancelled:
            answer = run_request(
                ready,
                display,
                ids,
                sampling=sampling,
                text=TextStream(ready.tokenizer, stops),
                cancelled=cancelled,
                logprobs=args.logprobs is not None,
                show=not args.json,
            )
    _report(answer, ids, display, sampling.seed, args)
    return EXIT_INTERRUPTED if answer.finished.reason == "cancelled" else 0


def parse_ids(text: str) -> list[int]:
    """Return the ids in "1,2,3"; raises ConfigError."""
    try:
        return [int(item) for item in split_list(text, "--prompt-ids", "ids such as 1,2,3")]
    except ValueError:
        raise ConfigError(f"--prompt-ids: {text!r} is not a list such as 1,2,3") from None


def _prompt(given: str | None) -> str:
    if given is not None and given != "-":
        return given
    if given is None and sys.stdin.isatty():
        raise ConfigError("no prompt: give a text, --prompt-ids, or pipe a text in")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input: byte {error.start} is not UTF-8") from None


def _report(
    answer: Answer, ids: list[int], display: Display, seed: int, args: argparse.Namespace
) -> None:
    if not args.json:
        display.text("" if answer.text.endswith("\n") else "\n")
        display.line(closing_line(answer.finished))
        return
    found: dict[str, object] = {"prompt_ids": ids, "ids": answer.ids, "text": answer.text}
    found |= as_json(answer.finished) | {"seed": seed}
    if args.logprobs is not None:
        found["logprobs"] = [
            {"id": choice.id, "logprob": choice.logprob, "top": choice.top}
            for choice in answer.choices
        ]
    sys.stdout.write(json.dumps(found) + "\n")
