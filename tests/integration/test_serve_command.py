"""What `headrace serve` refuses before it starts anything, and what it says."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _serve(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "headrace.py"), "serve", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--host", "0.0.0.0"), "other machines could reach it"),
        (("--model", "/nowhere"), "/nowhere"),
        (("--port", "99999"), "--port: '99999' is not a whole number"),
        (("--token-file", "/nowhere"), "/nowhere: cannot be read"),
        (("--context", "0"), "--context"),
    ],
)
def test_a_wrong_setting_is_one_line_and_status_2(flags: tuple[str, ...], words: str) -> None:
    done = _serve(*flags)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_port_that_is_taken_ends_it_with_the_frontends_words(runtime_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = _serve(
            *("--runtime-dir", str(runtime_dir), "--state-dir", str(runtime_dir / "state")),
            *("--port", str(port)),
        )
    assert done.returncode == 2
    assert f"127.0.0.1 port {port}: cannot be bound: Address already in use" in done.stderr
    assert "headrace: the frontend did not start" in done.stderr
    assert not list(runtime_dir.glob("serve-*"))
