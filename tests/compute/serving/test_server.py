"""The service's sockets against frontends that behave, and others."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.wire import messages as m
from protocol.wire.sockets import RuntimePaths
from tests.support.frames import bad_frames
from tests.support.raw_frontend import RawFrontend
from tests.support.scripted_compute import FINGERPRINT, ScriptedCompute, scripted_compute


@pytest.fixture
def compute(runtime_dir: Path) -> Iterator[ScriptedCompute]:
    with scripted_compute(runtime_dir, max_waiting=2, context=300) as compute:
        compute.says = [11, 12, 13]
        yield compute


@pytest.fixture
def frontend(compute: ScriptedCompute, runtime_dir: Path) -> Iterator[RawFrontend]:
    with RawFrontend(runtime_dir) as frontend:
        assert isinstance(frontend.join(FINGERPRINT), m.Joined)
        yield frontend


def _eventually(holds: Callable[[], Any], seconds: float = 5.0) -> None:
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.005)


def _generate(number: int, **changes: Any) -> m.Generate:
    fields: dict[str, Any] = {"token_ids": (1, 2, 3), "sampling": {}, "deadline_ms": 0} | changes
    return m.Generate(number, **fields)


def test_a_request_is_queued_runs_and_ends(frontend: RawFrontend) -> None:
    frontend.say(_generate(7))
    queued, progress, *tokens, done = frontend.hear_until(m.Done)
    assert queued == m.Queued(7, 0)
    assert progress == m.Progress(7, 0, 3)
    assert [token.ids for token in tokens] == [(11,), (12,), (13,)]
    assert (done.id, done.reason, done.usage["n_new"]) == (7, "length", 3)


def test_frontends_of_another_version_or_model_are_refused_with_both_sides_named(
    compute: ScriptedCompute, runtime_dir: Path
) -> None:
    with RawFrontend(runtime_dir) as frontend:
        refused = frontend.join(b"x" * 16)
        assert (refused.reason, FINGERPRINT.hex() in refused.text) == ("fingerprint", True)
        frontend.say(m.Join((9, 3), FINGERPRINT, 1))
        refused = frontend.hear()
        assert refused.reason == "version"
        assert "9.3" in refused.text


def test_before_join_and_before_the_life_socket_nothing_is_taken(
    compute: ScriptedCompute, runtime_dir: Path
) -> None:
    with RawFrontend(runtime_dir) as frontend:
        frontend.say(_generate(1))
        assert frontend.hear().reason == "hello_first"
        frontend.join(FINGERPRINT, attach=False)
        frontend.say(_generate(2))
        refused = frontend.hear()
        assert (refused.reason, refused.request) == ("hello_first", 2)
        assert frontend.attach() == b"ok"
        frontend.say(_generate(3))
        assert frontend.hear() == m.Queued(3, 0)


def test_another_process_cannot_attach_to_a_session(
    compute: ScriptedCompute, runtime_dir: Path
) -> None:
    with RawFrontend(runtime_dir) as frontend:
        frontend.join(FINGERPRINT, pid=1, attach=False)
        assert b"not that of pid" in frontend.attach()


def test_the_life_socket_refuses_what_is_no_request(
    compute: ScriptedCompute, runtime_dir: Path
) -> None:
    path = RuntimePaths.of_compute(runtime_dir).descriptor_socket
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(5)
        stranger.connect(str(path))
        stranger.send(b"hello")
        assert b"descriptor socket: found" in stranger.recv(256)
        assert stranger.recv(256) == b""


def test_a_session_that_does_not_attach_is_ended(
    compute: ScriptedCompute, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compute.serving.server.ATTACH_MS", 50)
    with RawFrontend(runtime_dir) as frontend:
        frontend.join(FINGERPRINT, attach=False)
        assert compute.server.n_sessions == 1
        _eventually(lambda: compute.server.n_sessions == 0)


def test_beyond_the_queues_bound_a_request_is_refused_with_a_time_to_retry(
    compute: ScriptedCompute, frontend: RawFrontend
) -> None:
    compute.gate.clear()
    for number in (1, 2, 3, 4):
        frontend.say(_generate(number))
    *heard, refused = frontend.hear_until(m.Refused)
    assert (refused.reason, refused.request) == ("busy", 4)
    assert refused.retry_ms in (2000, 3000)
    compute.gate.set()
    for _ in range(3):
        heard += frontend.hear_until(m.Done)
    begun = [message.id for message in heard if isinstance(message, m.Progress)]
    assert begun == [1, 2, 3]


def test_a_waiting_request_is_cancelled_at_once_and_its_followers_move_up(
    compute: ScriptedCompute, frontend: RawFrontend
) -> None:
    compute.gate.clear()
    for number in (1, 2, 3):
        frontend.say(_generate(number))
    _eventually(lambda: compute.jobs)
    frontend.say(m.CancelGenerate(2))
    done = frontend.hear_until(m.Done)[-1]
    assert (done.id, done.reason) == (2, "cancelled")
    assert frontend.hear_until(m.Queued)[-1] == m.Queued(3, 1)
    frontend.say(m.CancelGenerate(1))
    assert frontend.hear_until(m.Done)[-1].id == 1


def test_a_deadline_ends_a_request_that_waits_and_one_that_runs(
    compute: ScriptedCompute, frontend: RawFrontend
) -> None:
    compute.gate.clear()
    frontend.say(_generate(1, deadline_ms=300))
    frontend.say(_generate(2, deadline_ms=50))
    ends = [frontend.hear_until(m.Done)[-1] for _ in range(2)]
    assert [(done.id, done.reason) for done in ends] == [(2, "deadline"), (1, "deadline")]


def test_a_frontend_that_dies_takes_its_requests_with_it(
    compute: ScriptedCompute, frontend: RawFrontend, runtime_dir: Path
) -> None:
    compute.gate.clear()
    with RawFrontend(runtime_dir) as other:
        other.join(FINGERPRINT)
        other.say(_generate(1))
        other.say(_generate(2))
        _eventually(lambda: compute.queue.n_waiting == 1)
        frontend.say(_generate(1))
        _eventually(lambda: compute.queue.n_waiting == 2)
    _eventually(lambda: compute.ends == ["cancelled"] and compute.queue.n_waiting == 0)
    compute.gate.set()
    assert frontend.hear_until(m.Done)[-1].reason == "length"
    assert compute.server.n_sessions == 1


def test_prompts_in_parts_are_joined_and_those_over_the_context_refused(
    compute: ScriptedCompute, frontend: RawFrontend
) -> None:
    for number in range(2):
        frontend.say(m.PromptPart(1, tuple(range(100 * number, 100 * number + 100))))
    frontend.say(_generate(1, token_ids=(7,)))
    frontend.hear_until(m.Done)
    assert compute.jobs[0].prompt_ids == (*range(200), 7)
    for _ in range(4):
        frontend.say(m.PromptPart(2, tuple(range(100))))
    refused = frontend.hear_until(m.Refused)[-1]
    assert (refused.reason, refused.request) == ("limit", 2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_ids": ()}, "limit"),
        ({"token_ids": tuple(range(301))}, "limit"),
        ({"token_ids": (5000,)}, "malformed"),
        ({"sampling": {"temperature": "hot"}}, "malformed"),
    ],
)
def test_a_request_that_cannot_be_run_is_refused_by_its_number(
    frontend: RawFrontend, changes: dict[str, Any], reason: str
) -> None:
    frontend.say(_generate(9, **changes))
    refused = frontend.hear()
    assert (refused.reason, refused.request) == (reason, 9)


def test_garbage_is_refused_and_harms_nobody(frontend: RawFrontend) -> None:
    for frame in bad_frames(300):
        frontend.say_frame(frame)
    frontend.say_frame(b"a", b"b")
    frontend.say(m.Status(999))
    while True:
        heard = frontend.hear()
        assert heard is not None
        if isinstance(heard, m.StatusReport) and heard.request == 999:
            break
    assert heard.values["state"] == "scripted"
    assert heard.tiers == b""
    frontend.say(m.Status(1000, tiers=True))
    assert frontend.hear().tiers == bytes([0, 1, 1, 0, 0, 2])


def test_messages_that_are_not_for_compute_are_refused(frontend: RawFrontend) -> None:
    frontend.say(m.Stats(4))
    refused = frontend.hear()
    assert (refused.reason, refused.request) == ("role", 4)
    frontend.say(m.Ping(5))
    assert frontend.hear() == m.Pong(5)


def test_a_frontend_that_reads_late_gets_every_token(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protocol.wire.replies.DEAF_MS", 60_000)  # the machine may be busy
    with (
        scripted_compute(runtime_dir, context=20_000) as compute,
        RawFrontend(runtime_dir) as frontend,
    ):
        compute.says = [number % 4000 for number in range(12_000)]  # more than the kernel takes
        frontend.join(FINGERPRINT)
        frontend.say(_generate(1))
        _eventually(lambda: compute.ends, 20)
        frontend.say(m.Ping(9))
        _queued, _progress, *tokens, done = frontend.hear_until(m.Done)
        assert [token.ids[0] for token in tokens] == compute.says
        assert done.usage["n_new"] == len(compute.says)
        assert frontend.hear() == m.Pong(9)


def test_a_frontend_that_does_not_read_is_dropped_and_nobody_waits_for_it(
    compute: ScriptedCompute, frontend: RawFrontend, runtime_dir: Path
) -> None:
    compute.says = [11] * 20_000
    with RawFrontend(runtime_dir) as deaf:
        deaf.join(FINGERPRINT)
        deaf.say(_generate(1))
        _eventually(lambda: compute.server.n_sessions == 1, 20)
        frontend.say(_generate(2, sampling={"max_tokens": 3}))
        assert frontend.hear_until(m.Done)[-1].reason == "length"


def test_at_the_services_end_every_request_gets_its_done(
    compute: ScriptedCompute, frontend: RawFrontend
) -> None:
    compute.gate.clear()
    for number in (1, 2):
        frontend.say(_generate(number))
    _eventually(lambda: compute.jobs and compute.queue.n_waiting == 1)
    compute.server.stop_jobs()
    ends = [frontend.hear_until(m.Done)[-1] for _ in range(2)]
    assert {(done.id, done.reason) for done in ends} == {(1, "cancelled"), (2, "cancelled")}
    compute.close()
    assert frontend.life is not None
    assert frontend.life.recv(16) == b""
