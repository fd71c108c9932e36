"""`headrace serve` under clients that leave, dawdle and send nonsense, and kills of its parts."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.running_frontend import connect, eventually
from tests.support.serving import MODULES, Serving, serving

N_CLIENTS = 6
N_TOKENS = 8
MAX_GROWTH_BYTES = 48 << 20
USER = [{"role": "user", "content": "Who goes there?"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "My lords,", "max_tokens": N_TOKENS},
    "/v1/chat/completions": {
        "messages": USER,
        "max_tokens": N_TOKENS,
        "reasoning_effort": "none",
    },
    "/v1/responses": {
        "input": "Who goes there?",
        "max_output_tokens": N_TOKENS,
        "reasoning": {"effort": "none"},
    },
    "/v1/messages": {
        "messages": USER,
        "max_tokens": N_TOKENS,
        "thinking": {"type": "disabled"},
    },
}
NONSENSE = (b"", b"{", b"[]", b"\xff", b"[" * 500, b'{"messages": 5, "max_tokens": 1}', b'{"a":1}')


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    directory = Path(tempfile.mkdtemp(prefix="hr-", dir="/tmp"))
    with serving(directory, "--max-waiting", str(N_CLIENTS - 3)) as served:
        yield served
    shutil.rmtree(directory)


class Clients:
    """Requests of every kind, one after the other on several threads."""

    def __init__(self, served: Serving, seed: int) -> None:
        self._served = served
        self._seed = seed
        self.seen: Counter[str] = Counter()

    def send(self, n_requests: int) -> None:
        with ThreadPoolExecutor(N_CLIENTS) as pool:
            list(pool.map(self._one, range(n_requests)))

    def _one(self, place: int) -> None:
        rng = random.Random(1000 * self._seed + place)
        path, body = rng.choice(list(BODIES.items()))
        kind = rng.choices(("whole", "stream", "slow", "leave", "nonsense"), (1, 1, 1, 6, 5))[0]
        stream = kind in ("stream", "slow") or (kind == "leave" and rng.random() < 0.5)
        raw = json.dumps(body | {"stream": stream}).encode()
        raw = rng.choice(NONSENSE) if kind == "nonsense" else raw
        while not self._sent(kind, path, raw, stay_s=0.15 * rng.random() ** 2):
            time.sleep(0.1)
        self.seen[kind] += 1

    def _sent(self, kind: str, path: str, raw: bytes, stay_s: float) -> bool:
        """False where the queue was full."""
        with contextlib.closing(connect(self._served.url)) as connection:
            connection.request("POST", path, raw)
            if kind == "leave":
                time.sleep(stay_s)
                return True
            answer = connection.getresponse()
            if answer.status == 429:
                assert int(answer.headers["retry-after"]) >= 1
                self._told_no(answer, path, {429})
                return False
            if kind == "nonsense":
                self._told_no(answer, path, {400})
            else:
                self._answered(answer, path, kind)
            return True

    def _told_no(self, answer: Any, path: str, statuses: set[int]) -> None:
        body = json.loads(answer.read())
        assert answer.status in statuses, body
        assert body["error"]["message"]
        assert (body.get("type") == "error") == path.startswith("/v1/messages")
        self.seen[str(answer.status)] += 1

    def _answered(self, answer: Any, path: str, kind: str) -> None:
        assert answer.status == 200, answer.read()
        text = b""
        while kind == "slow" and (part := answer.read(200)):
            text += part
            time.sleep(0.01)
        text += answer.read()
        # As a key: the text that the model learnt has errors and terrors.
        assert b'"error":' not in text.replace(b'"error":null', b"")
        if kind != "whole":
            ends = {
                "/v1/responses": b"event: response.",
                "/v1/messages": b'data: {"type":"message_stop"}\n\n',
            }
            assert ends.get(path, b"data: [DONE]\n\n") in text
        else:
            json.loads(text)
        self.seen["200"] += 1


def _held(served: Serving, part: str) -> tuple[int, int]:
    """(descriptors, resident bytes) of a child."""
    folder = Path("/proc", str(served.pid_of(part)))
    pages = int((folder / "statm").read_text().split()[1])
    return len(list((folder / "fd").iterdir())), pages * 4096


def _is_quiet(served: Serving) -> bool:
    metrics = served.ask("/metrics").body.decode()
    compute = served.ask("/ready").json["compute"]
    return (
        "headrace_generations 0.0" in metrics
        and "headrace_http_active 1.0" in metrics
        and (compute["state"], compute["n_waiting"]) == ("idle", 0)
    )


@pytest.mark.parametrize(
    ("n_requests", "n_kills"),
    [(60, 1), pytest.param(2000, 10, marks=[pytest.mark.accept, pytest.mark.timeout(1200)])],
)
def test_requests_of_every_kind_end_in_an_answer_and_leave_nothing_behind(
    served: Serving, n_requests: int, n_kills: int
) -> None:
    clients = Clients(served, seed=n_kills)
    clients.send(n_requests // 4)
    eventually(lambda: _is_quiet(served), 20)
    before = {part: _held(served, part) for part in MODULES}
    killers = [threading.Timer(1.0 + 8 * n, served.kill, ("daemon",)) for n in range(n_kills)]
    for killer in killers:
        killer.start()
    clients.send(n_requests - n_requests // 4)
    for killer in killers:
        killer.join()
    eventually(lambda: _is_quiet(served), 20)
    for part in ("compute", "frontend"):
        most, _ = before[part]  # the connection that was asked last may take a moment to go
        eventually(lambda part=part, most=most: _held(served, part)[0] <= most, 5)  # type: ignore[misc]
        _, n_bytes = _held(served, part)
        assert n_bytes - before[part][1] < MAX_GROWTH_BYTES, part
    seen = clients.seen
    assert (
        sum(seen[kind] for kind in ("whole", "stream", "slow", "leave", "nonsense")) == n_requests
    )
    assert seen["200"] == seen["whole"] + seen["stream"] + seen["slow"]
    assert seen["400"] == seen["nonsense"]
    assert seen["429"]
    assert served.ask("/ready").json["compute"]["n_daemons_lost"] >= 1
    assert "the expert daemon ended with signal 9" in served.log.read_text()


def test_a_long_prompt_is_given_up_within_a_second_of_its_client(served: Serving) -> None:
    prompt = [300 + place % 3000 for place in range(3500)]
    connection = connect(served.url)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": prompt}))
    eventually(lambda: served.ask("/ready").json["compute"]["state"] == "running")
    connection.close()
    eventually(lambda: _is_quiet(served), 1.5)


def test_compute_killed_is_a_503_and_comes_back(served: Serving) -> None:
    body = BODIES["/v1/completions"]
    connection = connect(served.url)
    connection.request("POST", "/v1/completions", json.dumps(body | {"max_tokens": 500}))
    eventually(lambda: served.ask("/ready").json["compute"]["state"] == "running")
    served.kill("compute")
    answer = connection.getresponse()
    assert (answer.status, answer.headers["retry-after"]) == (503, "2")
    connection.close()
    reply = served.ask("/v1/messages", BODIES["/v1/messages"])
    assert (reply.status, reply.headers["retry-after"]) == (503, "2")
    assert served.ask("/ready").status == 503
    eventually(lambda: served.ask("/ready").status == 200, 60)
    assert served.ask("/v1/completions", body).status == 200


def test_the_frontend_and_the_daemon_hold_no_torch(served: Serving) -> None:
    maps = {part: Path("/proc", str(served.pid_of(part)), "maps").read_text() for part in MODULES}
    assert {part: "libtorch" in text for part, text in maps.items()} == {
        "daemon": False,
        "compute": True,
        "frontend": False,
    }


def test_a_second_command_starts_no_more_than_a_frontend(served: Serving) -> None:
    with serving(served.runtime_dir, name="second") as second:
        assert second.url != served.url
        assert (second.pid_of("daemon"), second.pid_of("compute")) == (0, 0)
        body = BODIES["/v1/completions"] | {"temperature": 0}
        texts = {
            s.ask("/v1/completions", body).json["choices"][0]["text"] for s in (served, second)
        }
        assert len(texts) == 1
    assert served.ask("/ready").status == 200


def test_sigterm_drains_and_leaves_no_process(served: Serving) -> None:
    pids = [served.pid_of(part) for part in MODULES]
    connection = connect(served.url)
    body = BODIES["/v1/completions"] | {"stream": True, "max_tokens": 20}
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = connection.getresponse()
    assert served.stop(signal.SIGTERM) == 0
    assert answer.read().endswith(b"data: [DONE]\n\n")
    connection.close()
    assert not any(Path("/proc", str(pid)).exists() for pid in pids)
