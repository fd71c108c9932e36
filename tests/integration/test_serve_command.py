"""What `headrace serve` refuses before it starts anything, and what it says."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from protocol.runtime_dir import default_runtime_dir

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


def test_a_port_that_is_taken_ends_it_before_anything_is_started(runtime_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = _serve(
            *("--runtime-dir", str(runtime_dir), "--state-dir", str(runtime_dir / "state")),
            *("--port", str(port)),
        )
    assert done.returncode == 2
    assert done.stderr == (
        f"headrace: 127.0.0.1 port {port}: cannot be bound: Address already in use; "
        "choose another --port or --host\n"
    )
    assert list(runtime_dir.iterdir()) == []


def test_a_gpu_that_is_not_there_ends_it_before_anything_is_started(runtime_dir: Path) -> None:
    done = _serve(
        *("--runtime-dir", str(runtime_dir), "--state-dir", str(runtime_dir / "state")),
        *("--port", "0", "--device", "cuda:99"),
    )
    assert done.returncode == 2
    assert done.stderr.startswith("headrace: --device: 'cuda:99' cannot be used: ")
    assert done.stderr.count("\n") == 1
    assert list(runtime_dir.iterdir()) == []


def test_a_directory_that_nobody_else_would_find_is_told(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "headrace.py"), "serve", "--port", "0"]
    command += ["--state-dir", str(tmp_path / "state")]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
    environment.pop("XDG_RUNTIME_DIR", None)
    with contextlib.suppress(ConfigError):
        default_runtime_dir(environment)
        pytest.skip("this machine has a /run/headrace of ours")
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True) as served:
        assert served.stderr is not None
        line = served.stderr.readline()
        served.stderr.readline()  # a child's: by then a signal is heeded
        served.send_signal(signal.SIGTERM)
        served.communicate(timeout=60)
    found = re.match(r"runtime directory of this server: (\S+);.* --runtime-dir$", line)
    assert found, line
    assert not Path(found[1]).exists()
