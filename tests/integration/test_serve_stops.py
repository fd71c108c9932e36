"""`headrace serve` stopped while a request runs: what its client and its terminal are told."""

from __future__ import annotations

import signal
import threading
from http.client import HTTPException
from pathlib import Path

import pytest

from tests.support.running_frontend import Reply, eventually
from tests.support.serving import serving

pytestmark = pytest.mark.timeout(120)

LONG = {"prompt": "Once", "max_tokens": 3000, "seed": 1, "logit_bias": {"1": -100}}


def _stopped(runtime_dir: Path, drain_s: float, n_signals: int) -> tuple[list[Reply], int, str]:
    """What the client got, the exit status, and the log."""
    replies: list[Reply] = []

    def client() -> None:
        try:
            replies.append(served.ask("/v1/completions", LONG, timeout=60))
        except (OSError, HTTPException):
            return

    with serving(runtime_dir, "--drain-s", str(drain_s)) as served:
        asking = threading.Thread(target=client)
        asking.start()
        eventually(lambda: served.ask("/ready").json["compute"]["state"] == "running")
        for _ in range(n_signals):
            served.process.send_signal(signal.SIGINT)
            if n_signals > 1:
                eventually(lambda: "waiting up to" in served.log.read_text())
        status = served.process.wait(30)
        asking.join(10)
        return replies, status, served.log.read_text()


def test_one_signal_says_what_is_waited_for_and_ends_it_with_a_503(runtime_dir: Path) -> None:
    replies, status, log = _stopped(runtime_dir, 0.5, 1)
    assert status == 0
    assert "waiting up to 0.5 s for 1 request; Ctrl-C again to stop now" in log
    assert [reply.status for reply in replies] == [503]
    assert replies[0].json["error"]["message"] == "this server is stopping"
    assert "Traceback" not in log
    assert "Exception" not in log


def test_a_second_signal_stops_it_at_once_without_a_traceback(runtime_dir: Path) -> None:
    replies, status, log = _stopped(runtime_dir, 60, 2)
    assert status == 130
    assert [reply.status for reply in replies] in ([], [503])
    assert "Traceback" not in log
    assert "Exception" not in log
