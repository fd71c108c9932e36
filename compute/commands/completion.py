"""`headrace completion SHELL`: print a script that completes subcommands, flags and file names.

bash: source <(headrace completion bash); fish and zsh: write it where the shell looks for them.
"""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the shell's name."""
    parser.add_argument("shell", choices=SHELLS, help="whose script to print")


def run(args: argparse.Namespace) -> int:
    """Print the script, made from the same parser that reads the arguments."""
    import shtab

    from headrace import build_parser

    print(shtab.complete(build_parser(), shell=args.shell))  # noqa: T201
    return 0
