from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import headrace
from compute.commands.plan.curve import curve_hits
from compute.commands.plan.replayed import cold_steps, hits_of, warm_steps
from expert_daemon.burst_sizes import bursts_of
from expert_daemon.replay import ArenaTier, replay
from expert_daemon.routing_trace import TraceShape
from expert_daemon.simulate import Disk, plan_setting, simulate
from expert_daemon.synthetic_trace import synthetic_trace
from expert_daemon.trace_file import write_trace
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.released_config import write_released_headers

GIVEN = ("--drive-rate", "7GB/s", "--latency-ms", "0.1")
SMALL = TraceShape(8, 32, 6, expert_bytes=26_112, slot_bytes=28_672)


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert headrace.main(["plan", "--json", *GIVEN, *flags]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("released")
    write_released_headers(directory)
    return directory


def test_the_released_model_on_a_machine_with_a_large_gpu(
    released: Path, capsys: pytest.CaptureFixture[str]
):
    found = planned(
        capsys,
        *("--model", str(released), "--memory", "128GiB", "--gpu-memory", "140GiB"),
        *("--device-rate", "4.8TB/s", "--link-rate", "55GB/s"),
    )
    laid = found["fit"]
    assert found["predicted"] is True
    assert found["device"] == "discrete"
    assert laid["dense_on_host_bytes"] == 0
    assert laid["dense_on_device_bytes"] + laid["device_cache_bytes"] <= 140 << 30
    assert laid["arena_bytes"] + laid["engram_page_cache_bytes"] <= 126 << 30
    assert 0 < laid["resident_share"] < 1
    assert 1 < found["cold"]["tokens_per_second"] < found["warm"]["tokens_per_second"] < 328
    assert found["warm"]["limit"] in ("compute", "copies", "disk")
    assert [row["prompt_tokens"] for row in found["first_token"]] == [1024, 8192, 32768]
    assert all(row["warm_s"] <= row["cold_s"] for row in found["first_token"])
    assert len(found["what_if"]) == 3
    assert all(row["gain"] >= 0.999 for row in found["what_if"])


def test_unified_memory_holds_weights_and_arena_together(
    released: Path, capsys: pytest.CaptureFixture[str]
):
    found = planned(
        capsys,
        *("--model", str(released), "--memory", "119GiB", "--gpu-memory", "0"),
        *("--device-rate", "273GB/s"),
    )
    laid = found["fit"]
    assert found["device"] == "unified"
    assert laid["device_cache_bytes"] == laid["dense_on_device_bytes"] == 0
    assert laid["dense_on_host_bytes"] > 5 << 30
    assert found["warm"]["copies_ms"] == 0
    assert [row["change"][:14] for row in found["what_if"]] == ["one more drive", "32 GiB more RA"]


def test_people_are_told_that_all_of_it_is_predicted(capsys: pytest.CaptureFixture[str]):
    assert headrace.main(["plan", "--model", "demo", *GIVEN]) == 0
    text = capsys.readouterr().out
    assert "All of this is predicted" in text
    for words in ("What fits where", "cold", "warm", "limit:", "first token", "one more drive"):
        assert words in text


def test_hits_come_from_a_trace_where_one_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    trace = synthetic_trace("skewed", 300, shape=SMALL)
    write_trace(tmp_path / "trace", trace)
    found = planned(
        capsys, "--model", "demo", "--trace", str(tmp_path / "trace"), "--arena", "3000000"
    )
    curve = planned(capsys, "--model", "demo", "--arena", "3000000")
    assert "300 tokens" in found["hits_from"]
    assert found["warm"]["hit_rate"] != curve["warm"]["hit_rate"]
    assert 0.5 < found["warm"]["hit_rate"] < 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--memory", "1GiB"), "leave 0 B for an arena"),
        (("--memory", "8GiB", "--arena", "7GiB"), "--arena is 7.0 GiB"),
        (("--gpu-memory", "1GiB"), "do not hold"),
        (("--read-threads", "0"), "wanted 1 to 64"),
        (("--chunk", "70000"), "wanted 1 to 65536"),
        (("--trace", "/nonexistent"), "/nonexistent"),
        (("--bench", "/nonexistent"), "cannot be read as a report"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
):
    assert headrace.main(["plan", "--model", "demo", *GIVEN, *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_trace_of_another_model_or_a_short_one_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_trace(tmp_path / "short", synthetic_trace("flat", 20, shape=SMALL))
    other = write_fake_checkpoint(tmp_path / "model")
    for model, message in (("demo", "20 tokens, wanted 128"), (str(other), "the model has")):
        flags = ("--model", model, "--trace", str(tmp_path / "short"))
        assert headrace.main(["plan", *GIVEN, *flags]) == 2
        assert message in capsys.readouterr().err


def test_bursts_of_a_trace_are_those_of_the_simulator():
    trace = synthetic_trace("topics", 400, shape=SMALL)
    setting = plan_setting(SMALL, "40%")
    bursts = bursts_of(trace, setting)
    tier = ArenaTier(SMALL.n_keys, setting.n_resident, _policy(), setting.max_experts)
    counted = replay(trace, tier)
    assert bursts.n_misses.sum() == counted.misses.sum()
    assert len(bursts.n_misses) == counted.bursts.sum()
    (figures, _) = simulate(trace, [setting], ["lfu-da"], Disk(1e9, 1.0))
    hits = hits_of(trace, bursts, warm_steps(trace))
    assert hits.rate == pytest.approx(figures.hit_rate)
    assert len(cold_steps(trace, 64)) == 64


def _policy() -> Any:
    from expert_daemon.policy import make_policy

    return make_policy("lfu-da", SMALL.n_keys)


@pytest.mark.accept
def test_the_curve_is_what_made_up_traces_give():
    kinds = ("skewed", "topics", "drift")
    for share in (0.1, 0.4, 0.7):
        rates = []
        for kind in kinds:
            trace = synthetic_trace(kind, 800)
            bursts = bursts_of(trace, plan_setting(trace.shape, f"{100 * share:.0f}%"))
            rates.append(hits_of(trace, bursts, warm_steps(trace)[200:]).rate)
        mean = sum(rates) / len(rates)
        assert abs(mean - curve_hits(share, 0, is_cold=False).rate) < 0.03
