"""`headrace top`: what it draws, and of which server."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import shutil
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import headrace
from compute.commands.top_view import View, heat_lines
from protocol.files.checkpoint import open_checkpoint
from tests.support.running_frontend import RunningFrontend, running_frontend
from tests.support.scripted_compute import scripted_compute

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "demo"


@pytest.fixture(scope="module")
def web() -> Iterator[RunningFrontend]:
    directory = Path(tempfile.mkdtemp(prefix="hr-", dir="/tmp"))
    with (
        scripted_compute(directory, fingerprint=open_checkpoint(DEMO).fingerprint) as compute,
        running_frontend(directory) as web,
    ):
        compute.says = [300, 301, 302]
        web.joined()
        assert web.ask("/v1/completions", {"prompt": "Hi", "max_tokens": 3}).status == 200
        yield web
    shutil.rmtree(directory)


def _drawn(view: View, state: dict[str, Any], now: float = 0.0, width: int = 120) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(view.of(state, width, now))
    return console.export_text()


def test_a_server_is_shown_with_its_tiers_map_and_requests(
    web: RunningFrontend, capsys: pytest.CaptureFixture[str]
) -> None:
    assert headrace.main(["top", "--url", web.url]) == 0
    shown = capsys.readouterr().out
    assert "headrace" in shown.splitlines()[0]
    assert "demo" in shown.splitlines()[0]
    assert "arena │" in shown
    assert "2 experts" in shown
    assert "      0 │ ██│" in shown  # layer 0 of the scripted map: expert 0 absent
    assert "completions  length" in shown
    assert "time: " in shown


def test_q_leaves_and_the_last_line_says_so(web: RunningFrontend) -> None:
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    command = [sys.executable, str(ROOT / "headrace.py"), "top", "--url", web.url, "--every", "60"]
    environment = os.environ | {"TERM": "xterm", "LINES": "12", "COLUMNS": "100"}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as shown:
        try:
            seen = b""
            while b"leaves" not in seen:  # of twelve lines the last one, though the map has more
                assert select.select([ours], [], [], 30)[0], seen
                seen += os.read(ours, 65536)
            assert b"q leaves" in seen
            os.write(ours, b"x")
            with pytest.raises(subprocess.TimeoutExpired):
                shown.wait(0.3)
            os.write(ours, b"q")
            assert shown.wait(10) == 0
        finally:
            shown.kill()
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)


def test_json_is_the_servers_own_object(
    web: RunningFrontend, capsys: pytest.CaptureFixture[str]
) -> None:
    assert headrace.main(["top", "--url", web.url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tiers"]["rows"] == ["011", "002"]


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--url", "http://127.0.0.1:1"], 1, "http://127.0.0.1:1: no server answers"),
        (["--url", "ftp://x"], 2, "--url: 'ftp://x' is not like http://127.0.0.1:8080"),
        (["--every", "0"], 2, "--every: 0 is under 0.2 seconds"),
        (["--last", "0"], 2, "--last: 0 is not between 1 and 256"),
        (["--token-file", "/nowhere"], 2, "/nowhere: cannot be read"),
    ],
)
def test_what_cannot_be_looked_at_is_one_line(
    capsys: pytest.CaptureFixture[str], flags: list[str], status: int, words: str
) -> None:
    assert headrace.main(["top", *flags]) == status
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_server_with_tokens_wants_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = Path(tempfile.mkdtemp(prefix="hr-", dir="/tmp"))
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text("open-sesame\n")
    with running_frontend(directory, token_file=tokens) as web:
        assert headrace.main(["top", "--url", web.url]) == 1
        assert "status 401; name its file of tokens with --token-file" in capsys.readouterr().err
        assert headrace.main(["top", "--url", web.url, "--token-file", str(tokens)]) == 0
        assert "compute is away" in capsys.readouterr().out
    shutil.rmtree(directory)


def test_rates_are_of_the_time_between_two_looks(web: RunningFrontend) -> None:
    state = web.ask("/v1/headrace/state").json
    state["compute"] |= {"hits": 100, "misses": 0, "bytes_read": 0}
    view = View()
    _drawn(view, state, 10.0)
    state["compute"] = state["compute"] | {"hits": 190, "misses": 10, "bytes_read": 4 << 20}
    assert "2.0 MiB/s read, hits 90.0 %" in _drawn(view, state, 12.0)
    state["compute"] = state["compute"] | {"hits": 0, "misses": 0, "bytes_read": 0}
    assert "read so far" in _drawn(view, state, 14.0)  # compute has been started again
    assert str(view.lost("http://x: no server").renderables[0]) == "http://x: no server"


def test_a_large_model_is_drawn_in_few_lines_that_fit() -> None:
    rows = ["1" * 192 + "0" * 192] * 39 + ["0" * 384]
    lines = heat_lines(rows, 80)
    assert len(lines) == 20
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("    0-1 │█")
    assert lines[0].endswith(" │")
    assert "▒" in lines[-1]
    assert heat_lines([], 80) == []
    assert heat_lines(["000000000100"], 80) == ["      0 │         █  │"]
