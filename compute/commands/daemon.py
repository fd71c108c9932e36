"""`headrace daemon`: run the expert daemon in this process, by itself, until it is told to stop.

The same as `python -m expert_daemon`, whose parser reads the flags. Imports no torch.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what stands for the daemon's own flags."""
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="flags of the daemon; --help lists them"
    )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status."""
    from expert_daemon.__main__ import main

    return main(args.arguments, prog="headrace daemon")
