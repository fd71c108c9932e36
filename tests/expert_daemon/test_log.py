from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time

import pytest

from expert_daemon.__main__ import EXIT_BUG
from expert_daemon.log import MOST_WAITING, LogWriter, flush, log, log_bug
from tests.support.running_daemon import ROOT

pytestmark = pytest.mark.timeout(30)


@contextlib.contextmanager
def unread():
    """A pipe of one page in the place of standard error: what reads from it."""
    reads, writes = os.pipe()
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 4096)
    read_end, write_end = os.fdopen(reads, "rb"), os.fdopen(writes, "w")
    with read_end, write_end, contextlib.redirect_stderr(write_end):
        yield reads


def lines_of(descriptor, last):
    """Read until a line ends with `last`."""
    found = b""
    while not found.endswith(f"{last}\n".encode()):
        found += os.read(descriptor, 65536)
    return found.decode().splitlines()


def test_a_log_that_nobody_reads_keeps_nobody_and_says_how_many_lines_found_no_room():
    writer = LogWriter()
    n_lines = 3 * MOST_WAITING
    with unread() as reads:
        began = time.monotonic()
        for number in range(n_lines):
            writer.put(f"line {number}\n")
        assert not writer.flush(0.05)
        assert time.monotonic() - began < 5
        found = lines_of(reads, "nobody read it")
        writer.put("last\n")
        assert lines_of(reads, "last") == ["last"]
        assert writer.flush()
    *lines, left_out = found
    assert MOST_WAITING <= len(lines) < n_lines
    assert lines == [f"line {number}" for number in range(len(lines))]
    n_left_out = n_lines - len(lines)
    assert left_out == f"{n_left_out} lines of the log were left out: nobody read it"


def test_a_pipe_that_does_not_block_is_waited_for():
    writer = LogWriter()
    with unread() as reads:
        os.set_blocking(sys.stderr.fileno(), False)
        writer.put("x" * 10_000 + "\n")
        assert not writer.flush(0.05)
        writer.put("last\n")
        assert lines_of(reads, "last") == ["x" * 10_000, "last"]


def test_lines_and_tracebacks_go_to_what_standard_error_was(capsys):
    log("one\nline")
    log_bug(ValueError("a bug"))
    assert flush()
    assert capsys.readouterr().err.splitlines() == ["one line", "ValueError: a bug"]


def test_a_log_that_was_closed_is_no_reason_to_stop(tmp_path):
    writer = LogWriter()
    with (tmp_path / "closed").open("w") as closed, contextlib.redirect_stderr(closed):
        pass
    with contextlib.redirect_stderr(closed):
        writer.put("lost\n")
    with (tmp_path / "log").open("w") as stream, contextlib.redirect_stderr(stream):
        writer.put("written\n")
        assert writer.flush()
    assert (tmp_path / "log").read_text() == "written\n"


@pytest.mark.parametrize("where", ["thread", "main"])
@pytest.mark.parametrize("is_read", [True, False])
def test_an_end_by_a_bug_says_so_and_waits_for_no_reader(where, is_read):
    program = (
        "import sys, threading\n"
        "from expert_daemon import __main__ as daemon\n"
        "sys.excepthook, threading.excepthook = daemon._end, daemon._end_on_bug\n"
        "def fail(): raise ValueError('a bug')\n"
        "if sys.argv[1] == 'main': fail()\n"
        "threading.Thread(target=fail).start()\n"
        "threading.Event().wait()\n"
    )
    reads, writes = os.pipe()
    with os.fdopen(reads) as read_end, os.fdopen(writes, "wb") as write_end:
        if not is_read:
            os.set_blocking(writes, False)
            with contextlib.suppress(BlockingIOError):
                while os.write(writes, bytes(4096)):
                    pass
            os.set_blocking(writes, True)
        command = [sys.executable, "-c", program, where]
        ended = subprocess.run(command, check=False, stderr=write_end, cwd=ROOT, timeout=20)
        write_end.close()
        assert ended.returncode == EXIT_BUG
        if is_read:
            text = read_end.read()
            assert "ValueError: a bug\n" in text
            assert text.endswith("the daemon ends\n") == (where == "thread")
