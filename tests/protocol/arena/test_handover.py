from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.arena.fds import create_arena
from protocol.arena.handover import listen_descriptors, start_with_descriptors
from protocol.errors import ConfigError

ROOT = Path(__file__).parents[3]
SHOW = """
import json, os, sys
from protocol.arena.handover import listen_descriptors
found = listen_descriptors()
contents = {name: os.pread(fd, 5, 0).decode() for name, fd in found.items()}
inheritable = any(os.get_inheritable(fd) for fd in found.values())
left = [name for name in os.environ if name.startswith("LISTEN_")]
open_now = sorted(int(fd) for fd in os.listdir("/proc/self/fd"))
print(json.dumps([contents, inheritable, left, list(found.values()), len(open_now)]))
"""


def _memory(text: bytes) -> int:
    descriptor = create_arena(4096)
    os.pwrite(descriptor, text, 0)
    return descriptor


def _environ() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "LISTEN_FDS": "9", "LISTEN_PID": "1"}


def test_child_finds_what_its_parent_passed() -> None:
    first, second = _memory(b"first"), _memory(b"other")
    process = start_with_descriptors(
        [sys.executable, "-c", SHOW],
        {"arena": first, "spare": second},
        environ=_environ(),
        stdout=subprocess.PIPE,
    )
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    contents, inheritable, left, numbers, n_open = eval(output, {"false": False, "true": True})
    assert contents == {"arena": "first", "spare": "other"}
    assert (inheritable, left, numbers) == (False, [], [3, 4])
    assert n_open == 6  # 0 1 2, both passed, and the listing itself
    assert os.pread(first, 5, 0) == b"first"
    os.close(first)
    os.close(second)


def test_child_without_descriptors_finds_none() -> None:
    process = start_with_descriptors(
        [sys.executable, "-c", SHOW], {}, environ=_environ(), stdout=subprocess.PIPE
    )
    output, _ = process.communicate(timeout=30)
    assert output.startswith(b"[{}, false, []")


def test_parent_keeps_no_descriptor_and_its_low_numbers_stay(tmp_path: Path) -> None:
    before = sorted(Path("/proc/self/fd").iterdir())
    arena = _memory(b"x")
    ran = []
    with start_with_descriptors(
        ["/bin/true"], {"arena": arena}, environ={}, before_exec=lambda: ran.append(1)
    ) as process:
        assert process.wait(30) == 0
    with pytest.raises(FileNotFoundError):
        start_with_descriptors([str(tmp_path / "none")], {"arena": arena}, environ={})
    os.close(arena)
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    assert ran == []  # it ran in the child


def test_name_that_would_break_the_list_is_refused() -> None:
    for name in ("", "a:b", "ä", "a\n"):
        with pytest.raises(ConfigError, match="descriptor name"):
            start_with_descriptors(["/bin/true"], {name: 0}, environ={})


def test_variables_for_another_process_are_ignored_and_removed() -> None:
    environ = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "arena", "HOME": "/"}
    assert listen_descriptors(environ) == {}
    assert environ == {"HOME": "/"}
    assert listen_descriptors({}) == {}
    assert listen_descriptors({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "0"}) == {}


@pytest.mark.parametrize(
    ("number", "names", "word"),
    [
        ("x", "", "LISTEN_FDS: found 'x'"),
        ("-1", "", "LISTEN_FDS"),
        ("1000", "", "wanted 0 to 64"),
        ("1", "a:b", "2 names for 1"),
    ],
)
def test_variables_that_make_no_sense_are_refused(number: str, names: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        listen_descriptors({"LISTEN_FDS": number, "LISTEN_FDNAMES": names})


def test_descriptor_that_is_not_open_is_refused() -> None:
    code = (
        "from protocol.arena.handover import listen_descriptors\n"
        "try: listen_descriptors({'LISTEN_FDS': '40'})\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout.startswith("ConfigError LISTEN_FDS: descriptor")
