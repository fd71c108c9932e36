"""Recording while the daemon serves: nothing waits, nothing is lost in silence."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any, cast

import numpy as np
import pytest

from expert_daemon import trace as recording
from expert_daemon.log import CLIENT_LINES_A_MINUTE, ClientLog, flush
from expert_daemon.routing_trace import TraceShape
from expert_daemon.sessions import Sessions
from expert_daemon.trace import TraceRecorder, Tracing
from expert_daemon.trace_desk import TraceDesk
from expert_daemon.trace_file import TraceFile, read_trace
from expert_daemon.trace_format import PICK
from protocol.errors import ConfigError

SHAPE = TraceShape(2, 10, 2, expert_bytes=100, slot_bytes=4096)
PICKS = np.array([(0, 1), (0, 2), (1, 3), (1, 4)], PICK).tobytes()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "picks.trace"


def test_what_was_recorded_is_there_after_the_end(path):
    recorder = TraceRecorder(path, SHAPE)
    for step in range(300):
        recorder.record(step, PICKS)
    recorder.record(300, PICKS[:4])
    recorder.close()
    trace, _ = read_trace(path)
    assert (len(trace), trace.n_tokens) == (301, 300)
    assert trace.step(0).tolist() == [1, 2, 13, 14]
    assert (recorder.n_steps, recorder.n_dropped) == (301, 0)
    assert recorder.n_bytes == path.stat().st_size


def test_steps_reach_the_file_without_an_end(path):
    recorder = TraceRecorder(path, SHAPE, flush_s=0.01)
    recorder.record(0, PICKS)
    deadline = time.monotonic() + 10
    while not recorder.n_steps and time.monotonic() < deadline:
        time.sleep(0.005)
    assert len(read_trace(path)[0]) == 1
    recorder.close()


def test_a_slow_disk_costs_steps_that_are_counted(path, monkeypatch):
    monkeypatch.setattr(recording, "MOST_WAITING", 10)
    recorder = TraceRecorder(path, SHAPE, flush_s=60)
    until(lambda: recorder.is_open)
    for step in range(25):
        recorder.record(step, PICKS)
    recorder.close()
    assert (recorder.n_steps, recorder.n_dropped) == (10, 15)


def until(holds):
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def no_space(file, steps):
    raise OSError(28, "No space left on device")


def test_a_disk_that_fails_ends_the_trace_and_nothing_else(path, monkeypatch, capfd):
    monkeypatch.setattr(TraceFile, "write", no_space)
    tracing = Tracing(SHAPE)
    tracing.start(path)
    tracing.record(0, PICKS)
    until(lambda: tracing.values()["trace_error"])
    tracing.record(1, PICKS)
    tracing.look()
    tracing.look()
    flush()
    error = f"trace {path}: No space left on device"
    assert tracing.values() == {
        "trace": str(path),
        "trace_steps": 0,
        "trace_steps_dropped": 2,
        "trace_error": error,
    }
    assert capfd.readouterr().err.count(f"{error}; nothing more is recorded") == 1
    tracing.close()


def test_a_trace_that_failed_begins_anew_in_the_same_file(path, monkeypatch):
    tracing = Tracing(SHAPE)
    tracing.start(path)
    with monkeypatch.context() as full:
        full.setattr(TraceFile, "write", no_space)
        tracing.record(0, PICKS)
        until(lambda: tracing.values()["trace_error"])
    tracing.start(path)
    assert tracing.values()["trace_error"] == ""
    tracing.record(1, PICKS)
    tracing.close()
    assert len(read_trace(path)[0]) == 1


@pytest.fixture
def hang(monkeypatch):
    """Has a method of every TraceFile wait until the test is over."""
    goes_on = threading.Event()

    def install(name):
        real = getattr(TraceFile, name)

        def waits(*args, **kwargs):
            goes_on.wait(30)
            return real(*args, **kwargs)

        monkeypatch.setattr(TraceFile, name, waits)
        return goes_on

    yield install
    goes_on.set()


def test_a_disk_that_hangs_is_not_waited_for(path, monkeypatch, capfd, hang):
    monkeypatch.setattr(recording, "CLOSE_S", 0.05)
    tracing = Tracing(SHAPE)
    tracing.start(path)
    hang("write")
    tracing.record(0, PICKS)
    tracing.stop()
    began = time.monotonic()
    tracing.close()
    assert time.monotonic() - began < 5
    flush()
    assert "the disk does not answer, the last steps are lost" in capfd.readouterr().err


def test_a_disk_that_hangs_as_the_file_is_opened_leaves_the_running_trace(path, monkeypatch, hang):
    monkeypatch.setattr(recording, "START_S", 0.05)
    tracing = Tracing(SHAPE)
    tracing.start(path)
    goes_on = hang("__init__")
    for number in range(recording.MOST_ENDING):
        with pytest.raises(ConfigError, match=r"other[0-9]: the disk does not answer"):
            tracing.start(path.with_name(f"other{number}"))
    with pytest.raises(ConfigError, match="the disks of 4 others do not answer"):
        tracing.start(path.with_name("one more"))
    tracing.record(1, PICKS)
    goes_on.set()
    until(lambda: all(one.has_ended.is_set() for one in tracing._ending))
    tracing.start(path.with_name("one more"))
    tracing.close()
    assert len(read_trace(path)[0]) == 1


def test_a_trace_that_is_being_opened_can_be_turned_off(path, hang):
    tracing = Tracing(SHAPE)
    goes_on = hang("__init__")
    recorder = tracing.begin(path)
    assert tracing.begin(path) is recorder
    with pytest.raises(ConfigError, match="is being opened"):
        tracing.begin(path.with_name("other"))
    assert tracing.stop() is recorder
    assert tracing.stop() is None
    goes_on.set()
    assert recorder.has_ended.wait(10)
    tracing.look()
    assert tracing.values()["trace"] == ""
    assert recorder.error == "the trace was turned off before it began"


def test_a_file_is_opened_again_when_its_former_recorder_has_let_it_go(path, hang):
    tracing = Tracing(SHAPE)
    tracing.start(path)
    goes_on = hang("close")
    tracing.stop()
    again = tracing.begin(path)
    time.sleep(0.05)
    assert (again.is_open, again.error) == (False, "")
    goes_on.set()
    until(lambda: again.is_open)
    tracing.close()
    assert again.error == ""


def test_lines_about_traces_are_so_many_a_minute(path, capfd):
    tracing = Tracing(SHAPE)
    for number in range(25):
        tracing.start(path.with_name(str(number)))
        until(lambda: all(one.has_ended.is_set() for one in tracing._ending))
    tracing.close()
    flush()
    assert capfd.readouterr().err.count("routing trace goes to") == 20


def test_a_daemon_has_one_limit_of_lines_for_its_traces_and_all_else_of_clients(path, capfd):
    tracing, clients = Tracing(SHAPE), ClientLog()
    loop = asyncio.new_event_loop()
    TraceDesk(Sessions(), cast("Any", None), tracing, loop, clients)
    for number in range(CLIENT_LINES_A_MINUTE):
        clients.note(f"line {number}")
    tracing.begin(path)
    until(lambda: tracing._next is None or tracing._next.is_open)
    tracing.look()
    assert tracing.values()["trace"] == str(path)
    tracing.close()
    loop.close()
    flush()
    assert "routing trace goes to" not in capfd.readouterr().err


def test_tracing_is_turned_on_and_off(path):
    tracing = Tracing(SHAPE)
    tracing.record(0, PICKS)
    tracing.stop()
    assert tracing.values() == {
        "trace": "",
        "trace_steps": 0,
        "trace_steps_dropped": 0,
        "trace_error": "",
    }
    tracing.start(path)
    tracing.start(path)
    tracing.record(1, PICKS)
    other = path.with_name("other.trace")
    tracing.start(other)
    assert tracing.values()["trace"] == str(other)
    tracing.record(2, PICKS)
    tracing.record(3, PICKS)
    tracing.close()
    tracing.record(4, PICKS)
    assert [len(read_trace(file)[0]) for file in (path, other)] == [1, 2]


def test_a_trace_that_cannot_begin_leaves_the_running_one(path):
    tracing = Tracing(SHAPE)
    tracing.start(path)
    with pytest.raises(ConfigError, match="No such file"):
        tracing.start(path.with_name("missing") / "it")
    tracing.record(1, PICKS)
    tracing.close()
    assert len(read_trace(path)[0]) == 1


def test_a_killed_writer_leaves_a_trace_that_its_successor_goes_on_with(path):
    code = (
        "import sys, time; from pathlib import Path\n"
        "from expert_daemon.routing_trace import TraceShape\n"
        "from expert_daemon.trace import TraceRecorder\n"
        "shape = TraceShape(2, 10, 2, 100, 4096)\n"
        "picks = bytes([0, 0, 1, 0, 0, 0, 2, 0, 1, 0, 3, 0, 1, 0, 4, 0])\n"
        "recorder = TraceRecorder(Path(sys.argv[1]), shape, flush_s=0.0005)\n"
        "step = 0\n"
        "while True:\n"
        "    recorder.record(step, picks); step += 1; time.sleep(0.0001)\n"
        "    if recorder.n_steps > 50: print('going', flush=True)\n"
    )
    n_before = 0
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "going\n"
            os.kill(child.pid, signal.SIGKILL)
        trace, notes = read_trace(path)
        assert len(trace) > n_before + 50
        assert trace.is_token.all()
        assert all("no whole block" in note for note in notes)
        n_before = len(trace)
