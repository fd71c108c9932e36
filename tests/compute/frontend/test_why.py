"""Where the time of requests went: the split, its endpoints, the histograms, the log."""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from compute.frontend.answer import Usage
from compute.frontend.metrics import Metrics
from compute.frontend.recent import MAX_REMEMBERED, PARTS, Recent, Remembered, shares, together
from compute.frontend.tokenizer import Tokenizer
from protocol.files.checkpoint import open_checkpoint
from tests.support.running_frontend import RunningFrontend, eventually, running_frontend
from tests.support.scripted_compute import ScriptedCompute, scripted_compute

DEMO = Path(__file__).resolve().parents[3] / "demo"
BODY = {
    "messages": [{"role": "user", "content": "Say it."}],
    "reasoning_effort": "none",
    "max_tokens": 8,
}
Pair = tuple[ScriptedCompute, RunningFrontend]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    directory = Path(tempfile.mkdtemp(prefix="hr-", dir="/tmp"))
    with (
        scripted_compute(directory, fingerprint=open_checkpoint(DEMO).fingerprint) as compute,
        running_frontend(directory) as web,
    ):
        web.joined()
        compute.says = Tokenizer.load(DEMO).encode("One, two, three, four, five, six.")
        yield compute, web
    shutil.rmtree(directory)


def _remembered(**spent: float) -> Remembered:
    usage = Usage(10, prompt_ms=1, queue_ms=20, prefill_ms=60, decode_ms=40, n_new=5)
    usage.io |= {"stall_ms": 70, "copy_ms": 10} | spent
    remembered = Remembered("x", "/v1/completions", usage)
    remembered.ended("stop")
    return remembered


def test_waits_and_copies_are_taken_out_of_prefill_and_decode() -> None:
    parts = _remembered().milliseconds()
    assert tuple(parts) == PARTS
    assert parts == {
        "compute": 20,
        "copies": 10,
        "disk": 70,
        "queue": 20,
        "prompt": 1,
        "other": pytest.approx(0, abs=5),
    }
    assert _remembered(stall_ms=1000).milliseconds()["compute"] == 0


def test_what_took_most_is_named_with_what_helps() -> None:
    told = together([_remembered(), _remembered(stall_ms=0)])
    assert (told["requests"], told["most"]) == (2, "compute")
    assert told["why"].startswith("compute 45 %, disk 29 %, queue 17 %, copies 8 %; compute: ")
    assert "--arena" in together([_remembered()])["why"]
    assert together([]) == {
        "requests": 0,
        "ms": dict.fromkeys(PARTS, 0.0),
        "most": None,
        "why": "no request yet",
    }
    assert shares({"disk": 99.5, "queue": 0.5}) == "disk 100 %"


def test_a_request_that_waits_spends_its_time_in_the_queue() -> None:
    remembered = Remembered("x", "/v1/completions", Usage(10))
    time.sleep(0.02)
    parts = remembered.milliseconds()
    assert parts["queue"] >= 20
    assert parts["other"] < 5


def test_the_oldest_request_is_forgotten() -> None:
    recent = Recent()
    for place in range(MAX_REMEMBERED + 5):
        recent.add(Remembered(str(place), "/v1/completions", Usage(1)))
    assert [one.id for one in recent.last(2)] == ["260", "259"]
    assert len(recent.last(1000)) == MAX_REMEMBERED


def test_why_tells_of_the_last_requests_newest_first(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    _, web = pair
    with caplog.at_level(logging.INFO, "headrace.frontend"):
        ids = [web.ask("/v1/chat/completions", BODY).json["id"] for _ in range(2)]
    told = web.ask("/v1/headrace/why?last=2").json
    assert [one["id"] for one in told["requests"]] == ids[::-1]
    one = told["requests"][0]
    assert (one["path"], one["end"], one["new_tokens"]) == ("/v1/chat/completions", "length", 8)
    assert one["hits_by_tier"] == {"arena": 48}
    assert set(one["ms"]) == set(PARTS)
    assert one["ms"]["compute"] == pytest.approx(10 + 10 - 0.5 - 0.25, abs=0.1)
    assert (one["ms"]["disk"], one["ms"]["queue"]) == (0.5, 1.0)
    assert told["together"]["requests"] == 2
    lines = [line for line in caplog.messages if line.startswith(ids[1])]
    assert re.fullmatch(
        r"\S+ length: 8 tokens after \d+ \(0 cached\) in [\d.]+ s, [a-z]+ \d+ %.*; "
        r"48 hits in the arena, 2 misses, 100 B read",
        lines[0],
    )


@pytest.mark.parametrize("last", ["0", "257", "x", "-1", "1e2", "٣"])
def test_a_wrong_count_is_refused(pair: Pair, last: str) -> None:
    from urllib.parse import quote

    reply = pair[1].ask(f"/v1/headrace/why?last={quote(last)}")
    assert (reply.status, reply.json["error"]["param"]) == (400, "last")


def test_state_has_the_map_of_experts_and_the_requests(pair: Pair) -> None:
    _, web = pair
    web.ask("/v1/chat/completions", BODY)
    found = web.ask("/v1/headrace/state?last=1").json
    assert (found["model"], found["problem"]) == ("demo", None)
    assert found["compute"]["state"] == "scripted"
    assert found["tiers"] == {
        "experts": {"disk": 3, "arena": 2, "device": 1},
        "rows": ["011", "002"],
    }
    assert len(found["requests"]) == 1


def test_without_compute_the_state_says_why() -> None:
    directory = Path(tempfile.mkdtemp(prefix="hr-", dir="/tmp"))
    with running_frontend(directory) as web:
        eventually(lambda: "does not run" in web.frontend.link.why)
        found = web.ask("/v1/headrace/state").json
    assert found["problem"] == "the model is loading"
    assert (found["compute"], found["tiers"], found["requests"]) == (None, None, [])
    shutil.rmtree(directory)


def test_the_numbers_are_histograms_too(pair: Pair) -> None:
    _, web = pair
    web.ask("/v1/chat/completions", BODY)
    page = web.ask("/metrics").body.decode()
    for name in (
        *('hits_count{tier="arena"}', "misses_count", "read_bytes_count"),
        *(f'seconds_count{{part="{part}"}}' for part in ("queue", "prefill", "decode", "stall")),
    ):
        assert re.search(rf"^headrace_request_{re.escape(name)} [1-9]", page, re.MULTILINE), name
    assert 'headrace_tokens_per_second_count{part="decode"}' in page


def test_the_page_of_the_docs_describes_every_metric_as_it_is() -> None:
    page = (DEMO.parent / "docs" / "serving.md").read_text()
    rows = re.findall(r"^\| `(headrace_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", page, re.MULTILINE)
    told = {name: (kind, text) for name, kind, _, text in rows}
    found = {}
    for metric in Metrics().registry.collect():
        name = metric.name + ("_total" if metric.type == "counter" else "")
        found[name] = (metric.type, metric.documentation)
    assert told == found


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_a_stop_string_ends_has_computes_own_figures(
    pair: Pair, stream: bool
) -> None:
    compute, web = pair
    ended = len(compute.ends)
    body = BODY | {"stop": ["thr"], "stream": stream, "stream_options": {"include_usage": True}}
    reply = web.ask("/v1/chat/completions", body)
    usage = reply.events[-2][1]["usage"] if stream else reply.json["usage"]
    assert usage["headrace"]["queue_ms"] == 1.0
    assert usage["headrace"]["prefill_ms"] == 10.0
    assert compute.ends[ended:] in (["cancelled"], ["length"])


def test_an_end_that_compute_never_tells_is_not_waited_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compute.frontend.answer._SETTLE_S", 0.05)
    compute, web = pair
    monkeypatch.setattr(compute.server, "send", _without_done(compute.server.send))
    reply = web.ask("/v1/chat/completions", BODY | {"stop": ["thr"]}, timeout=5)
    assert reply.json["choices"][0]["message"]["content"] == "One, two, "


def _without_done(send):
    def sent(session, message):
        if type(message).__name__ != "Done":
            send(session, message)

    return sent
