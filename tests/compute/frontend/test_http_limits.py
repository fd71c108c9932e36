"""Who may ask, what is refused and how, what happens to clients that leave or do not read."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from compute.frontend.config import FrontendConfig, read_tokens
from protocol.errors import ConfigError
from protocol.files.checkpoint import open_checkpoint
from tests.support.running_frontend import (
    RunningFrontend,
    ask,
    connect,
    eventually,
    running_frontend,
)
from tests.support.scripted_compute import ScriptedCompute, scripted_compute

DEMO = Path(__file__).resolve().parents[3] / "demo"
USER = [{"role": "user", "content": "Hi"}]
CHAT: dict[str, Any] = {"messages": USER, "reasoning_effort": "none"}
MESSAGES: dict[str, Any] = {"messages": USER, "max_tokens": 50}
PATHS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": MESSAGES,
}


@dataclass
class World:
    compute: ScriptedCompute
    web: RunningFrontend


@pytest.fixture(scope="module")
def shared() -> Iterator[World]:
    directory = Path(tempfile.mkdtemp(prefix="hr-", dir="/tmp"))
    fingerprint = open_checkpoint(DEMO).fingerprint
    with (
        scripted_compute(directory, fingerprint=fingerprint, max_waiting=2, context=600) as compute,
        running_frontend(directory, max_body=20_000, write_timeout_s=0.5) as web,
    ):
        web.joined()
        yield World(compute, web)
    shutil.rmtree(directory)


@pytest.fixture
def world(shared: World) -> Iterator[World]:
    shared.compute.says = [300, 301, 302]
    shared.compute.jobs.clear()
    shared.compute.ends.clear()
    shared.compute.gate.set()
    yield shared
    shared.compute.gate.set()
    eventually(lambda: shared.compute.queue.running is None)


def _error(reply: Any, path: str) -> dict[str, Any]:
    """The error, its shape checked."""
    if path.startswith("/v1/messages"):
        assert set(reply.json) == {"type", "error", "request_id"}
        assert reply.json["type"] == "error"
        assert set(reply.json["error"]) == {"type", "message"}
    else:
        assert set(reply.json) == {"error"}
        assert set(reply.json["error"]) == {"message", "type", "param", "code"}
    found: dict[str, Any] = reply.json["error"]
    assert found["message"]
    return found


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff{}", "not UTF-8"),
        (b"[]", "not a JSON object"),
        (b"[" * 100_0, "nested deeper"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, "nested deeper"),
        (b'{"temperature": NaN}', "NaN is no number"),
        (b'{"user": "\\ud800"}', "surrogate"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not JSON"),
    ],
)
def test_a_malformed_body_is_a_400_in_the_apis_shape(
    world: World, path: str, body: bytes, words: str
) -> None:
    reply = world.web.ask(path, body)
    assert reply.status == 400
    assert words in _error(reply, path)["message"]


@pytest.mark.parametrize(
    ("path", "changes", "param"),
    [
        ("/v1/chat/completions", {"n": 2}, "n"),
        ("/v1/completions", {"best_of": 3}, "best_of"),
        ("/v1/completions", {"prompt": None}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "prompt"),
        ("/v1/completions", {"prompt": [5000]}, "prompt"),
        ("/v1/completions", {"echo": True}, "echo"),
        ("/v1/completions", {"suffix": "x"}, "suffix"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"temperature": 3}, "temperature"),
        ("/v1/chat/completions", {"temperature": "hot"}, "temperature"),
        ("/v1/chat/completions", {"temperature": True}, "temperature"),
        ("/v1/chat/completions", {"top_p": 1.5}, "top_p"),
        ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens"),
        ("/v1/chat/completions", {"max_tokens": 1.5}, "max_tokens"),
        ("/v1/chat/completions", {"seed": "x"}, "seed"),
        ("/v1/chat/completions", {"stop": [""]}, "stop"),
        ("/v1/chat/completions", {"stop": [1]}, "stop"),
        ("/v1/chat/completions", {"stop": ["x"] * 50}, "stop"),
        ("/v1/chat/completions", {"stream": "yes"}, "stream"),
        ("/v1/chat/completions", {"top_logprobs": 3}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ("/v1/chat/completions", {"logit_bias": {"x": 1}}, "logit_bias"),
        ("/v1/chat/completions", {"logit_bias": {"5000": 1}}, "logit_bias"),
        ("/v1/chat/completions", {"logit_bias": {"5": 101}}, "logit_bias"),
        ("/v1/chat/completions", {"stream_options": 5}, "stream_options"),
        ("/v1/chat/completions", {"functions": [{"name": "f"}]}, "functions"),
        ("/v1/chat/completions", {"reasoning_effort": "huge"}, "reasoning_effort"),
        ("/v1/chat/completions", {"tool_choice": "required"}, "tool_choice"),
        ("/v1/chat/completions", {"tool_choice": "required", "tools": []}, "tool_choice"),
        ("/v1/messages", {"max_tokens": None}, None),
        ("/v1/messages", {"stop_sequences": "x" * 2000}, None),
        ("/v1/responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
        ("/v1/messages", {"tool_choice": {"type": "any"}}, None),
        ("/v1/responses", {"tool_choice": "required"}, "tool_choice"),
        ("/v1/responses", {"background": True}, "background"),
        ("/v1/responses", {"include": 5}, "include"),
    ],
)
def test_a_field_that_cannot_be_followed_is_named(
    world: World, path: str, changes: dict[str, Any], param: str | None
) -> None:
    reply = world.web.ask(path, PATHS[path] | changes)
    assert reply.status == 400
    error = _error(reply, path)
    if param is not None:
        assert error["param"] == param
        assert param in error["message"]


def test_a_schema_that_cannot_be_followed_is_refused_before_anything_is_queued(
    world: World,
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "("}},
        "required": ["a"],
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = world.web.ask("/v1/chat/completions", CHAT | {"response_format": form})
    assert reply.status == 400
    assert "regex" in _error(reply, "/")["message"]
    assert not world.compute.jobs


def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(world: World) -> None:
    body = {"prompt": [5] * 600}
    reply = world.web.ask("/v1/completions", body)
    error = _error(reply, "/v1/completions")
    assert (reply.status, error["code"]) == (400, "context_length_exceeded")
    assert error["message"].count("600") == 2
    assert world.web.ask("/v1/completions", {"prompt": [5] * 599}).status == 200
    assert world.compute.jobs[-1].wishes.max_tokens == 1


@pytest.mark.parametrize("path", PATHS)
def test_a_text_that_is_surely_too_long_is_told_how_long_at_least(world: World, path: str) -> None:
    text = "ring " * 3500
    said = [{"role": "user", "content": text}]
    own = {"prompt": text} if path == "/v1/completions" else {"messages": said}
    reply = world.web.ask(path, PATHS[path] | ({"input": text} if "input" in PATHS[path] else own))
    error = _error(reply, path)
    assert reply.status == 400
    assert re.search(r"at least \d+ tokens; .* does not fit the context of 600", error["message"])
    if path != "/v1/messages":
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", PATHS)
def test_a_body_over_the_limit_is_a_413_stated_or_not(world: World, path: str) -> None:
    body = json.dumps(PATHS[path] | {"user": "x" * 30_000}).encode()
    reply = world.web.ask(path, body)
    assert reply.status == 413
    _error(reply, path)
    with contextlib.closing(connect(world.web.url)) as connection:
        connection.request("POST", path, iter([body[:15_000], body[15_000:]]), encode_chunked=True)
        assert connection.getresponse().status == 413


def test_paths_and_methods_that_do_not_exist_are_told_in_shape(world: World) -> None:
    assert _error(world.web.ask("/nowhere"), "/")["type"] == "not_found_error"
    reply = world.web.ask("/v1/messages")
    assert reply.status == 405
    assert reply.headers["allow"] == "POST"
    _error(reply, "/v1/messages")


def test_headers_have_a_limit(world: World) -> None:
    many = {f"x-{place}": "1" for place in range(150)}
    assert world.web.ask("/v1/models", headers=many).status == 431
    assert world.web.ask("/v1/models", headers={"x": "y" * 40_000}).status == 431


def test_a_host_that_is_not_this_machine_is_refused(world: World) -> None:
    for host, status in (
        ("evil.example", 403),
        ("127.0.0.1.evil.example:80", 403),
        ("localhost:8080", 200),
        ("[::1]:8080", 200),
        ("127.0.0.1", 200),
    ):
        assert world.web.ask("/v1/models", headers={"Host": host}).status == status, host


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://evil.example", 403),
        ("https://evil.example:8080", 403),
        ("null", 403),
        ("http://127.0.0.1:8080", 200),
        ("http://localhost", 200),
        ("http://[::1]:3000", 200),
        ("chrome-extension://abc", 200),
    ],
)
def test_a_page_from_elsewhere_may_not_ask(world: World, origin: str, status: int) -> None:
    reply = world.web.ask("/v1/models", headers={"origin": origin})
    assert reply.status == status
    assert world.web.ask("/health", headers={"origin": origin}).status == 200


def test_every_answer_names_its_request(world: World) -> None:
    reply = world.web.ask("/v1/messages", b"{")
    assert reply.headers["request-id"] == reply.json["request_id"]
    assert reply.headers["x-request-id"].startswith("req_")


# the queue


def _stream(web: RunningFrontend, path: str, body: dict[str, Any]) -> Any:
    """A stream whose first bytes have come; the connection and its answer."""
    connection = connect(web.url)
    connection.request("POST", path, json.dumps(body | {"stream": True}))
    return connection, connection.getresponse()


def test_beyond_the_queue_a_request_is_a_429_with_a_time_to_retry(world: World) -> None:
    world.compute.gate.clear()
    streams = []
    for place in range(3):
        streams.append(_stream(world.web, "/v1/completions", PATHS["/v1/completions"]))
        assert streams[-1][1].headers["x-headrace-queue-position"] == str(place)
        eventually(lambda: world.compute.jobs)
    for path, body in PATHS.items():
        reply = world.web.ask(path, body)
        assert reply.status == 429
        assert int(reply.headers["retry-after"]) >= 1
        assert _error(reply, path)["type"] == "rate_limit_error"
    world.compute.gate.set()
    places = []
    for connection, answer in streams:
        text = answer.read().decode()
        assert text.endswith("data: [DONE]\n\n")
        places.append([line for line in text.splitlines() if "queue position" in line])
        connection.close()
    assert places[0] == []
    assert places[1][0] == ": queue position 1"
    assert places[2][0] == ": queue position 2"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_leaves_is_cancelled_running_or_queued_and_no_other(
    world: World, path: str, stream: bool
) -> None:
    world.compute.gate.clear()
    leaving, staying = connect(world.web.url), connect(world.web.url)
    running = connect(world.web.url)
    for connection in (running, leaving, staying):
        body = PATHS[path] | {"stream": stream}
        connection.request("POST", path, json.dumps(body))
        eventually(lambda: world.compute.jobs)
    eventually(lambda: world.compute.queue.n_waiting == 2)
    _reset(leaving)
    eventually(lambda: world.compute.queue.n_waiting == 1, 1.0)
    _reset(running)
    eventually(lambda: world.compute.ends == ["cancelled"], 1.0)
    world.compute.gate.set()
    answer = staying.getresponse()
    assert answer.status == 200
    assert answer.read()
    staying.close()
    assert world.compute.ends[-1] == "length"
    eventually(lambda: world.web.frontend.link.n_generations == 0)


def _reset(connection: Any) -> None:
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def test_a_client_that_reads_nothing_is_hung_up_on(world: World) -> None:
    world.compute.says = [300] * 580
    body = json.dumps({"prompt": "Hi", "max_tokens": 580, "stream": True, "logprobs": 20}).encode()
    world.web.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", int(world.web.url.rpartition(":")[2])))
        deaf.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
            + str(len(body)).encode()
            + b"\r\n\r\n"
            + body
        )
        eventually(lambda: len(world.compute.ends) == 1)
        eventually(lambda: world.web.frontend.recent.last(1)[0].end == "left")
        eventually(lambda: not world.web.server.server_state.connections)


# compute away


def test_without_compute_every_endpoint_is_a_503_and_comes_back_with_it(runtime_dir: Path) -> None:
    fingerprint = open_checkpoint(DEMO).fingerprint
    with running_frontend(runtime_dir) as web:
        assert web.ask("/ready").status == 503
        assert web.ask("/health").status == 200
        for path, body in PATHS.items():
            reply = web.ask(path, body)
            assert reply.status == 503
            assert int(reply.headers["retry-after"]) >= 1
            _error(reply, path)
        with scripted_compute(runtime_dir, fingerprint=fingerprint) as compute:
            compute.says = [300, 301]
            web.joined()
            assert web.ask("/v1/completions", PATHS["/v1/completions"]).status == 200
            compute.gate.clear()
            connection, answer = _stream(web, "/v1/messages", MESSAGES)
            eventually(lambda: len(compute.jobs) == 2)
        assert b"event: error" in answer.read()
        connection.close()
        eventually(lambda: web.frontend.link.joined is None)
        assert web.ask("/v1/messages", MESSAGES).json["error"]["type"] == "overloaded_error"
        with scripted_compute(runtime_dir, fingerprint=fingerprint) as compute:
            compute.says = [300, 301]
            eventually(lambda: web.frontend.link.joined is not None)
            assert web.ask("/v1/messages", MESSAGES).status == 200


def test_compute_of_another_model_is_not_used(runtime_dir: Path) -> None:
    with scripted_compute(runtime_dir), running_frontend(runtime_dir) as web:
        eventually(lambda: "the frontend's model is" in web.ask("/ready").json["why"])
        assert web.ask("/v1/completions", PATHS["/v1/completions"]).status == 503


def test_a_request_that_takes_too_long_is_a_504(runtime_dir: Path) -> None:
    fingerprint = open_checkpoint(DEMO).fingerprint
    with (
        scripted_compute(runtime_dir, fingerprint=fingerprint) as compute,
        running_frontend(runtime_dir, request_timeout_s=0.2) as web,
    ):
        web.joined()
        compute.says = [300]
        compute.gate.clear()
        assert web.ask("/v1/completions", PATHS["/v1/completions"]).status == 504


def test_draining_lets_what_runs_end_and_takes_no_more(runtime_dir: Path) -> None:
    fingerprint = open_checkpoint(DEMO).fingerprint
    with scripted_compute(runtime_dir, fingerprint=fingerprint) as compute:
        web = RunningFrontend(runtime_dir, drain_s=10)
        web.joined()
        compute.says = [300, 301, 302]
        compute.gate.clear()
        connection, answer = _stream(web, "/v1/completions", PATHS["/v1/completions"])
        eventually(lambda: compute.jobs)
        closing = threading.Thread(target=web.close)
        closing.start()
        eventually(lambda: web.server.should_exit)
        time.sleep(0.2)
        with pytest.raises(OSError, match="refused"):
            ask(web.url, "/health")
        compute.gate.set()
        assert answer.read().endswith(b"data: [DONE]\n\n")
        connection.close()
        closing.join(10)
        assert not closing.is_alive()


# tokens


def test_with_a_token_file_only_its_tokens_pass(runtime_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# ours\nfirst-token\n\nsecond-token\n")
    file.chmod(0o600)
    with running_frontend(runtime_dir, token_file=file) as web:
        assert web.ask("/health").status == 200
        assert web.ask("/ready").status == 503
        for path in ("/v1/models", "/metrics", "/openapi.json"):
            assert web.ask(path).status == 401
        reply = web.ask("/v1/messages", MESSAGES)
        assert (reply.status, reply.json["error"]["type"]) == (401, "authentication_error")
        assert reply.headers["www-authenticate"] == "Bearer"
        for headers, status in (
            ({"Authorization": "Bearer first-token"}, 200),
            ({"authorization": "bearer second-token"}, 200),
            ({"x-api-key": "second-token"}, 200),
            ({"Authorization": "Bearer first"}, 401),
            ({"Authorization": "Basic first-token"}, 401),
            ({"Authorization": "Bearer f\u00fcr"}, 401),
            ({"x-api-key": ""}, 401),
        ):
            raw = {name: value.encode("utf-8").decode("latin-1") for name, value in headers.items()}
            assert web.ask("/v1/models", headers=raw).status == status, headers


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [("# none\n", 0o600, "holds no token"), ("secret\n", 0o644, "others may read it")],
)
def test_a_token_file_that_is_empty_or_open_to_others_is_refused(
    tmp_path: Path, text: str, mode: int, words: str
) -> None:
    file = tmp_path / "tokens"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=words):
        read_tokens(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_tokens(tmp_path / "nowhere")


def test_an_address_that_others_reach_needs_a_token_file(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(ConfigError, match=r"other machines could reach it"):
            FrontendConfig(host=host)
        assert FrontendConfig(host=host, token_file=tmp_path / "tokens").host == host
    for host in ("127.0.0.1", "127.0.0.5", "::1", "localhost"):
        assert FrontendConfig(host=host).token_file is None
