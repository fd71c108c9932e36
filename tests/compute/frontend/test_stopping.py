"""What clients are told, and what the log says, when a server stops while requests run."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from compute.frontend import server
from compute.frontend.http import event_stream
from protocol.files.checkpoint import open_checkpoint
from tests.support.running_frontend import Reply, RunningFrontend, eventually, running_frontend
from tests.support.scripted_compute import scripted_compute

DEMO = Path(__file__).resolve().parents[3] / "demo"
USER = [{"role": "user", "content": "Hi"}]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "reasoning_effort": "none"},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 50},
}


@pytest.fixture
def directory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="hr-", dir="/tmp"))
    yield made
    shutil.rmtree(made)


@dataclass
class Stopped:
    """What came of a server that was stopped while requests ran."""

    replies: dict[str, Reply] = field(default_factory=dict)
    n_active: int = 0


def _stopped(directory: Path, drain_s: float, stream: bool, times: int = 1) -> Stopped:
    stopped = Stopped()
    with (
        scripted_compute(directory, fingerprint=open_checkpoint(DEMO).fingerprint) as compute,
        running_frontend(directory, drain_s=drain_s) as web,
    ):
        web.joined()
        compute.says = [300] * 10
        compute.gate.clear()

        def client(path: str) -> None:
            stopped.replies[path] = web.ask(path, PATHS[path] | {"stream": stream})

        clients = [threading.Thread(target=client, args=(path,)) for path in PATHS]
        for one in clients:
            one.start()
        eventually(lambda: web.frontend.link.n_generations == len(PATHS))
        for _ in range(times):
            web.server.stop()
        for one in clients:
            one.join(10)
        eventually(lambda: compute.queue.n_waiting == 0)
    return stopped


def _unheard(log: pytest.LogCaptureFixture) -> list[str]:
    """The log's lines that no user should see."""
    return [one.getMessage() for one in log.records if one.exc_info or one.levelno >= logging.ERROR]


@pytest.mark.parametrize("times", [1, 2])
def test_what_runs_at_the_end_of_the_drain_gets_its_apis_503(
    directory: Path, caplog: pytest.LogCaptureFixture, times: int
) -> None:
    caplog.set_level(logging.INFO)
    stopped = _stopped(directory, 0.3 if times == 1 else 30, stream=False, times=times)
    assert set(stopped.replies) == set(PATHS)
    for path, reply in stopped.replies.items():
        assert (reply.status, reply.headers["retry-after"]) == (503, "2"), path
        assert reply.json["error"]["message"] == "this server is stopping"
        kind = "overloaded_error" if path == "/v1/messages" else "service_unavailable_error"
        assert reply.json["error"]["type"] == kind
    assert _unheard(caplog) == []
    waiting = "waiting up to 0.3 s for 4 requests; Ctrl-C again to stop now"
    assert (waiting in caplog.messages) == (times == 1)


def test_a_stream_that_runs_at_the_end_of_the_drain_ends_with_its_apis_error(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stopped = _stopped(directory, 0.3, stream=True)
    assert set(stopped.replies) == set(PATHS)
    for path, reply in stopped.replies.items():
        assert reply.status == 200
        assert "this server is stopping" in str(reply.events[-2:]), path
    assert _unheard(caplog) == []


def test_a_server_without_requests_stops_without_a_word(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with running_frontend(directory):
        pass
    assert not [line for line in caplog.messages if "waiting up to" in line]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_a_prompt_that_is_being_made_is_left_with_a_503(
    directory: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
) -> None:
    replies: list[Reply] = []
    making = threading.Event()

    async def off_loop(*_: Any) -> None:
        making.set()
        await asyncio.sleep(60)

    monkeypatch.setattr(server, "_LAST_WORDS_S", 1)
    with (
        scripted_compute(directory, fingerprint=open_checkpoint(DEMO).fingerprint),
        running_frontend(directory, drain_s=0.1) as web,
    ):
        web.joined()
        monkeypatch.setattr(web.frontend, "off_loop", off_loop)
        client = threading.Thread(target=lambda: replies.append(web.ask(path, PATHS[path])))
        client.start()
        assert making.wait(5)
        web.server.stop()
        client.join(10)
    assert [one.status for one in replies] == [503]
    assert replies[0].json["error"]["message"] == "this server is stopping"
    assert not [one for one in caplog.records if one.exc_info]


def test_a_stream_that_cannot_end_is_hung_up_on_without_a_traceback(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, cut = threading.Event(), threading.Event()

    async def paced(*_: Any) -> Any:
        yield b": begun\n\n"
        begun.set()
        await asyncio.sleep(60)

    def client() -> None:
        try:
            web.ask("/v1/completions", PATHS["/v1/completions"] | {"stream": True})
        except (OSError, HTTPException):
            cut.set()

    monkeypatch.setattr(event_stream, "_paced", paced)
    monkeypatch.setattr(server, "_LAST_WORDS_S", 0)
    with (
        scripted_compute(directory, fingerprint=open_checkpoint(DEMO).fingerprint),
        running_frontend(directory, drain_s=0.1) as web,
    ):
        web.joined()
        asking = threading.Thread(target=client)
        asking.start()
        assert begun.wait(5)
        web.server.stop()
        asking.join(10)
    assert cut.is_set()
    assert not [one for one in caplog.records if one.exc_info]


def test_until_compute_was_there_once_the_model_is_loading(directory: Path) -> None:
    fingerprint = open_checkpoint(DEMO).fingerprint

    def told(web: RunningFrontend) -> tuple[str, str]:
        ready = web.ask("/ready")
        reply = web.ask("/v1/completions", PATHS["/v1/completions"])
        assert (ready.status, reply.status, reply.headers["retry-after"]) == (503, 503, "2")
        return ready.json["why"], reply.json["error"]["message"]

    with running_frontend(directory) as web:
        assert told(web) == ("the model is loading", "the model is loading")
        with scripted_compute(directory, fingerprint=fingerprint):
            web.joined()
        eventually(lambda: web.frontend.link.joined is None)
        why, message = told(web)
        assert why.startswith("compute ")
        assert message.startswith("the model is not there now: compute ")
