"""The exporter's process, where the system does not give one."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from expert_daemon import exporter_child
from expert_daemon.exporter_child import ExporterChild


def test_one_that_cannot_be_begun_is_told_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = [errno.EAGAIN, errno.EAGAIN, errno.ENOMEM]
    begun: list[Any] = []
    lines: list[str] = []

    def popen(command: list[str], **_: Any) -> Any:
        begun.append(command)
        code = codes[len(begun) - 1]
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(exporter_child, "log", lines.append)
    child = ExporterChild(tmp_path, "127.0.0.1:1")
    child.tend()
    child.tend()  # its pause has not passed
    assert len(begun) == 1
    monkeypatch.setattr(exporter_child, "PAUSE_S", 0.0)
    child._next_at = 0.0
    child.tend()
    child.tend()
    assert len(begun) == 3
    assert [line.partition("again: ")[2] for line in lines] == [
        f"[Errno {code}] {os.strerror(code)}" for code in (errno.EAGAIN, errno.ENOMEM)
    ]
    child.close()


EXPORTER = """
import sys
from pathlib import Path
said = Path(sys.argv[1]).read_text()
print(said, flush=True)
if said == "serving":
    import time; time.sleep(60)
sys.exit(1)
"""


def test_why_it_ends_is_told_when_it_changes_and_that_it_serves_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(exporter_child, "log", lines.append)
    monkeypatch.setattr(exporter_child, "PAUSE_S", 0.0)
    said = tmp_path / "said"
    child = ExporterChild(tmp_path, "127.0.0.1:1")
    child._command = [sys.executable, "-c", EXPORTER, str(said), "127.0.0.1:1"]
    begun = 0
    begin = child._begin

    def counted() -> None:
        nonlocal begun
        begun += 1
        begin()

    monkeypatch.setattr(child, "_begin", counted)

    def tend_until(done: Callable[[], bool]) -> None:
        end = time.monotonic() + 20
        while not done():
            assert time.monotonic() < end
            child.tend()
            time.sleep(0.01)

    try:
        said.write_text("the address is taken")
        tend_until(lambda: begun == 4)
        assert lines == [
            "metrics: the exporter ended with status 1, it is tried again: the address is taken"
        ]
        said.write_text("another reason")
        tend_until(lambda: len(lines) > 1)
        assert lines[1].endswith("it is tried again: another reason")
        said.write_text("serving")
        tend_until(lambda: len(lines) > 2)
        assert lines[2] == "metrics: served at 127.0.0.1:1 now"
    finally:
        child.close()
