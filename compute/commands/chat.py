"""`headrace chat`: talk with the model, line by line.

Works on a terminal and with lines piped in, which are then shown before their answers. Thoughts go
to standard error; those of earlier turns are left out of the prompt. A line that begins with / is a
command to the talk. Each turn goes on from the state that the one before left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from compute.config import COMPUTE_KEYS, COMPUTE_OPTIONS, ComputeConfig, load_config
from compute.frontend.config import FRONTEND_OPTIONS, load_encoding
from compute.options import add_flags
from protocol.wording import nearest

from .requests import (
    Answer,
    add_request_arguments,
    run_request,
    sampling_of,
    say_what_is_unused,
    stops_of,
)
from .talk import SpokenText, Talk
from .terminal import Display, as_json, closing_line, interruptible

if TYPE_CHECKING:
    from compute.sampler import Sampling

    from .opening import Opened

_KEPT = ("prefix_cache", "session_dir")
_COMMANDS = ("/new", "/help", "/quit", "/exit")
_HELP = """\
/new    begin a new talk
/help   say this
/quit   end; so does Ctrl-D
A line that begins with // is said with one / less. Ctrl-C ends an answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the system text, thinking, and the flags of a request."""
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before all else")
    parser.add_argument(
        "--think",
        action=argparse.BooleanOptionalAction,
        help="let the model think before it answers (default: as over HTTP, where it does)",
    )
    parser.add_argument(
        "--effort", metavar="N", help="how thoroughly: 1 to 100, or a name such as low"
    )
    add_flags(parser, {"chat_template": FRONTEND_OPTIONS["chat_template"]}, {"chat_template": None})
    add_request_arguments(parser)
    defaults = {name: getattr(ComputeConfig(), name) for name in _KEPT}
    add_flags(parser, {name: COMPUTE_OPTIONS[name] for name in _KEPT}, defaults)


def run(args: argparse.Namespace) -> int:
    """Answer line after line until the input ends; return the exit status."""
    from compute.frontend.encoding import Encoding

    from .opening import opened

    config = load_config(args, os.environ)
    settings, template = load_encoding(args, os.environ, COMPUTE_KEYS)
    sampling, stops = sampling_of(config, args), stops_of(args)
    display = Display(quiet=args.json)
    with opened(config, display, keep=True) as ready:
        say_what_is_unused(ready, display)
        encoding = Encoding(ready.tokenizer, settings, template=template)
        effort = args.effort and (int(args.effort) if args.effort.isdecimal() else args.effort)
        talk = Talk(encoding, args.system, args.think, effort)
        talk.prompt("Hello.")  # refused before anything is said
        for line in _lines(ready, display, talk, echo=not args.json):
            _turn(ready, display, talk, line, (sampling, stops), args)
    return 0


def _turn(
    ready: Opened,
    display: Display,
    talk: Talk,
    line: str,
    wishes: tuple[Sampling, tuple[str, ...]],
    args: argparse.Namespace,
) -> None:
    """Answer one line."""
    prompt = talk.prompt(line)
    if len(prompt.ids) >= ready.engine.context:
        display.line(f"the talk has {len(prompt.ids)} tokens: over --context; it starts anew")
        talk.turns.clear()
        prompt = talk.prompt(line)
    sampling, stops = wishes
    text = talk.answer(prompt, stops, (lambda _text: None) if args.json else display.thought)
    with interruptible() as cancelled:
        answer = run_request(
            ready,
            display,
            prompt.ids,
            sampling=sampling,
            text=text,
            cancelled=cancelled,
            logprobs=args.logprobs is not None,
            show=not args.json,
        )
    talk.turns.append((line, text.said))
    _report(answer, text, prompt.ids, display, as_object=args.json)


def _lines(ready: Opened, display: Display, talk: Talk, *, echo: bool) -> Iterator[str]:
    """Yield what the user says; on a terminal with editing and a prompt."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  input() edits lines with it

        display.line("/help names the commands, Ctrl-D ends the talk, Ctrl-C the answer.")
    while True:
        try:
            with ready.engine.source.idle():
                line = input("> ") if is_terminal else _piped_line()
        except EOFError:
            return
        except KeyboardInterrupt:
            display.line("")
            continue
        if line.startswith("/") and not line.startswith("//"):
            if not _obeyed(line.strip(), display, talk):
                return
        elif line.strip():
            said = line.removeprefix("/")
            if echo and not is_terminal:
                display.text(f"> {said}\n")
            yield said


def _obeyed(command: str, display: Display, talk: Talk) -> bool:
    """Do what a command says; False where the talk is to end."""
    if command in ("/quit", "/exit"):
        return False
    if command == "/new":
        talk.turns.clear()
        display.line("a new talk")
    else:
        display.line(_HELP if command == "/help" else _unknown(command))
    return True


def _unknown(command: str) -> str:
    near = nearest(command, _COMMANDS)
    meant = f"did you mean {near}?" if near else "/help names the commands"
    return f"there is no {command}; {meant}"


def _piped_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _report(
    answer: Answer, text: SpokenText, ids: tuple[int, ...], display: Display, *, as_object: bool
) -> None:
    if as_object:
        found: dict[str, object] = {"prompt_ids": list(ids), "ids": answer.ids, "text": text.said}
        found |= {"reasoning": text.reasoning, "cached": answer.finished.n_cached}
        sys.stdout.write(json.dumps(found | as_json(answer.finished)) + "\n")
        sys.stdout.flush()
        return
    display.text("\n" if text.said.endswith("\n") else "\n\n")
    display.line(closing_line(answer.finished))
