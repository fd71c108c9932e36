"""The exporter's process, where the system does not give one."""

from __future__ import annotations

import errno
import os
import subprocess
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
