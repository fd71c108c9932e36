"""`headrace top`: what a running server does, in the terminal, anew every few seconds until `q`.

Asks the server's frontend over HTTP, as the page at `/` does; starts nothing. Where standard output
is no terminal, or with --once, it is shown once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import sys
import termios
import time
import tty
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from compute.frontend.config import read_tokens
from protocol.errors import ConfigError, HeadraceError

DEFAULT_URL = "http://127.0.0.1:8080"
_ANSWER_S = 5.0
_FEWEST_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add where the server is and how it is shown."""
    parser.add_argument(
        "--url", default=DEFAULT_URL, help=f"where the server listens (default: {DEFAULT_URL})"
    )
    parser.add_argument("--token-file", metavar="FILE", help="whose first bearer token is used")
    parser.add_argument(
        "--every", metavar="SECONDS", type=float, default=2.0, help="between looks (default: 2)"
    )
    parser.add_argument("--last", metavar="N", type=int, default=10, help="requests shown")
    parser.add_argument("--once", action="store_true", help="show it once and end")
    parser.add_argument("--json", action="store_true", help="print one object, once")


class Server:
    """The server that is looked at.

    Raises ConfigError where its address or the token file cannot be used.
    """

    def __init__(self, url: str, token_file: str | None, last: int) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"--url: {url!r} is not like {DEFAULT_URL}")
        if not 1 <= last <= 256:
            raise ConfigError(f"--last: {last} is not between 1 and 256")
        self.url = url.rstrip("/")
        self._request = urllib.request.Request(f"{self.url}/v1/headrace/state?last={last}")  # noqa: S310 - the scheme is checked above
        if token_file is not None:
            token = read_tokens(Path(token_file))[0].decode()
            self._request.add_header("authorization", f"Bearer {token}")

    def state(self) -> dict[str, Any]:
        """Return what the server says of itself. Raises HeadraceError."""
        try:
            with urllib.request.urlopen(self._request, timeout=_ANSWER_S) as answer:  # noqa: S310
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.HTTPError as error:
            hint = "; name its file of tokens with --token-file" if error.code == 401 else ""
            raise HeadraceError(f"{self.url}: status {error.code}{hint}") from None
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise HeadraceError(f"{self.url}: no server answers: {reason}") from None


def run(args: argparse.Namespace) -> int:
    """Show until q or Ctrl-C; return the exit status."""
    if not args.every >= _FEWEST_S:
        raise ConfigError(f"--every: {args.every:g} is under {_FEWEST_S:g} seconds")
    server = Server(args.url, args.token_file, args.last)
    if args.json:
        sys.stdout.write(json.dumps(server.state()) + "\n")
        return 0
    from rich.console import Console

    from .top_view import View

    console, view = Console(highlight=False), View()
    if args.once or not console.is_terminal:
        console.print(view.of(server.state(), console.width, time.monotonic()))
        return 0
    _watch(server, args.every)
    return 0


def _watch(server: Server, every_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from .top_view import View, on_screen

    console, view = Console(highlight=False), View()
    first = view.of(server.state(), console.width, time.monotonic())
    screen = partial(on_screen, leaves="q leaves" if sys.stdin.isatty() else "Ctrl-C leaves")
    with (
        contextlib.suppress(KeyboardInterrupt),
        _waiting() as is_left_within,
        Live(screen(first), console=console, screen=True, auto_refresh=False) as live,
    ):
        live.refresh()
        while not is_left_within(every_s):
            try:
                shown = view.of(server.state(), console.width, time.monotonic())
            except HeadraceError as error:
                shown = view.lost(str(error))
            live.update(screen(shown), refresh=True)


@contextlib.contextmanager
def _waiting() -> Iterator[Callable[[float], bool]]:
    """Give a function that waits so many seconds; True at once where q is pressed meanwhile."""
    if not sys.stdin.isatty():
        yield _sleeps
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield partial(_has_q_within, descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _sleeps(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _has_q_within(descriptor: int, seconds: float) -> bool:
    ends = time.monotonic() + seconds
    while (left := ends - time.monotonic()) > 0:
        if select.select([descriptor], [], [], left)[0]:
            keys = os.read(descriptor, 1024)
            if not keys or b"q" in keys.lower():  # none: the terminal is gone
                return True
    return False
