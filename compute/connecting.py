"""The engine's connection to the expert daemon, waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from protocol.errors import DaemonBusy, DaemonLost
from protocol.files.checkpoint import Checkpoint
from protocol.wire.client import ExpertClient

_HELLO_MS = 250  # short, so that a child that died is soon seen
_RETRY_S = 0.01
_ADVICE = "ask the server over HTTP, or give another --runtime-dir"


def connect_engine(
    runtime_dir: Path,
    checkpoint: Checkpoint,
    wait_s: float,
    tend: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda _: None,
) -> ExpertClient:
    """Connect as the engine; wait while the daemon starts or another engine holds it.

    tend   called between tries: whoever started the daemon looks after it there
    say    called once with a line for people where another engine holds the daemon

    Raises DaemonLost or DaemonBusy after `wait_s`, ProtocolError at once.
    """
    deadline = time.monotonic() + wait_s
    told = False
    while True:
        tend()
        try:
            return ExpertClient(
                runtime_dir,
                role="engine",
                fingerprint=checkpoint.fingerprint,
                top_k_batch=checkpoint.config.top_k,
                hello_ms=_HELLO_MS,
            )
        except DaemonLost:
            if time.monotonic() > deadline:
                raise
        except DaemonBusy as error:
            if time.monotonic() > deadline:
                raise DaemonBusy(
                    f"{error}; waited {wait_s:g} s: where it is a server, {_ADVICE}", error.pid
                ) from None
            if not told:
                told = True
                say(
                    f"pid {error.pid} uses the daemon in {runtime_dir} (a server, perhaps): "
                    f"waiting up to {wait_s:g} s; or {_ADVICE}"
                )
        time.sleep(_RETRY_S)
