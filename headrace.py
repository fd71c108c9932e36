"""The command line of headrace: picks the subcommand and imports its room only then.

`from headrace import ExpertClient` gives the public client of the expert daemon. Importing this
module imports neither torch nor a room.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.wire.client import ExpertClient

__all__ = ["ExpertClient", "__version__", "main"]
__version__ = "0.1.0"

COMMANDS = {
    "generate": "write text that follows a prompt",
    "chat": "talk with the model",
    "serve": "answer OpenAI's and Anthropic's APIs over HTTP",
    "top": "show what a running server does",
    "eval": "measure the perplexity of a text",
    "daemon": "run the expert daemon by itself",
    "cache": "show, refill or resize the expert daemon's cache",
    "tune": "measure how this machine's drive is read fastest",
    "doctor": "check this machine and name the fix of each finding",
    "bench": "measure speed, cold and warm apart, as a report to keep",
    "inspect": "show what a checkpoint holds and what fits where",
    "plan": "predict what fits where, and how fast",
    "pack": "make the fast form of a checkpoint, an expert pack",
    "verify": "read every byte of a model and say which are bad",
    "simulate": "replay a routing trace over caches of other sizes",
    "completion": "print a completion script for a shell",
}

_MAY_BE_EMPTY = frozenset({"prompt", "system"})  # texts
_ROOMS = frozenset({"compute", "demo", "expert_daemon", "kernels", "protocol"})
_INTERRUPTED = 128 + signal.SIGINT
_PIPE_CLOSED = 128 + signal.SIGPIPE


def __getattr__(name: str) -> object:
    """Import the public client when it is first asked for."""
    if name == "ExpertClient":
        from protocol.wire.client import ExpertClient

        return ExpertClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def build_parser(commands: Sequence[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """Return the parser; only the named commands' own modules are imported for their flags."""
    from protocol.flag_parser import FlagParser

    parser = FlagParser(
        prog="headrace",
        description="Run DeepSeek-V4.1 Flash with its experts streamed from disk.",
    )
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    parsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        own = parsers.add_parser(name, help=text, description=text)
        if name in commands:
            _module(name).add_arguments(own)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status; an error is one line on standard error."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    _open_closed_streams()
    try:
        status = _run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        _say("interrupted")
        return _INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return _PIPE_CLOSED
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in _ROOMS:
            raise
        from protocol.wording import to_install

        extra = "serve" if arguments[:1] == ["serve"] else "compute"
        _say(f"the package {error.name} is missing: {to_install(extra)}")
        return 1
    except OSError as error:
        _drop_output()
        _say(str(error))
        return 1
    return status


def _run(arguments: list[str]) -> int:
    from protocol.errors import ConfigError, HeadraceError

    if not arguments:
        build_parser(()).print_help(sys.stderr)
        return 2
    args = _parsed(arguments)
    _warn_of_variables()
    try:
        _refuse_empty(args, arguments)
        return int(_module(args.command).run(args))
    except HeadraceError as error:
        _say(str(error))
        return 2 if isinstance(error, ConfigError) else 1


def _warn_of_variables() -> None:
    """Say which variables look like settings and are none: a file's unknown key is refused.

    They are taken out of the environment, else every process that is started would say it again.
    """
    if any(name.startswith("HEADRACE_") for name in os.environ):
        from protocol.setting_names import unknown_variables

        for name, line in unknown_variables(os.environ).items():
            _say(line)
            del os.environ[name]


def _refuse_empty(args: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Refuse a value that was given and is empty: a script's unset variable, not a choice."""
    from protocol.errors import ConfigError

    for argument, after in zip(arguments, [*arguments[1:], None], strict=True):
        if argument == "--":
            return
        flag, equals, value = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        is_empty = flag.startswith("--") and (value if equals else after) == ""
        # A flag without a value is True or False here, and a list refuses its empty items itself.
        if is_empty and name not in _MAY_BE_EMPTY and vars(args).get(name, "") == "":
            raise ConfigError(f"{flag}: '' is empty, wanted a value; without one leave it out")


def _say(text: str) -> None:
    print(f"headrace: {text}", file=sys.stderr)  # noqa: T201


def _open_closed_streams() -> None:
    """Give the streams that the caller closed a place to go: Python leaves them None."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123


def _drop_output() -> None:
    """Send what standard output still holds nowhere, so that the exit does not fail on it again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    if arguments[:1] == ["daemon"]:  # it has a parser of its own
        return argparse.Namespace(command="daemon", arguments=list(arguments[1:]))
    named = [argument for argument in arguments[:1] if argument in COMMANDS]
    return build_parser(named).parse_args(arguments)


def _module(command: str) -> Any:
    return importlib.import_module(f"compute.commands.{command}")


if __name__ == "__main__":
    sys.exit(main())
