from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import headrace
from compute.commands.bench.compare import compare
from compute.commands.bench.report import BenchRun, read_report, summary
from compute.commands.bench.running import Settings, Texts
from protocol.errors import ConfigError

QUICK = ("--repeats", "1", "--warm-ups", "1", "--new-tokens", "4", "--prompt-tokens", "12")
RUN = BenchRun("cold", 12, 4, 0.1, 120.0, 20.0, 90, 10, 1000, 30.0, 5)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real report of the demo, very short."""
    path = tmp_path_factory.mktemp("bench") / "report.json"
    assert headrace.main(["bench", *QUICK, "--report", str(path), "--json"]) == 0
    return path


def test_a_report_keeps_cold_and_warm_apart_and_says_what_a_hit_is(report: Path):
    found = read_report(report)
    assert found["cold"]["runs"][0]["kind"] == "cold"
    assert found["warm"]["runs"][0]["kind"] == "warm"
    assert found["cold"]["runs"][0]["prompt_misses"] > 0
    assert found["resident"]["hit_rate"] == 1
    assert found["resident"]["runs"][0]["bytes_read"] == 0
    assert "hits / (hits + misses)" in found["definition"]["hit_rate"]
    assert not {"decode_tokens_per_second", "mean", "total"} & set(found)
    for fact in ("cpu", "cores", "memory_bytes", "gpus", "file_system", "torch", "headrace"):
        assert fact in found["machine"]


def test_a_report_is_compared_with_itself(report: Path, capsys: pytest.CaptureFixture[str]):
    flags = ["bench", "--from", str(report), "--compare", str(report)]
    assert headrace.main([*flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["comparison"]
    assert set(found["ratios"]) == {"cold", "warm", "resident"}
    assert found["ratios"]["cold"]["decode_tokens_per_second"] == 1
    assert found["differences"] == {}
    assert headrace.main(flags) == 0
    text = capsys.readouterr().out
    assert "cold and warm are never averaged" in text
    assert "this over that" in text


def test_plan_takes_computes_own_time_from_a_report(
    report: Path, capsys: pytest.CaptureFixture[str]
):
    given = ("--drive-rate", "7GB/s", "--latency-ms", "0.1", "--json")
    assert headrace.main(["plan", "--model", "demo", "--bench", str(report), *given]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    rate = read_report(report)["resident"]["decode_tokens_per_second"]
    assert found["warm"]["compute_ms"] == pytest.approx(1000 / rate)


def test_cold_and_warm_runs_have_no_common_figure():
    assert summary([RUN, RUN])["hit_rate"] == 0.9
    with pytest.raises(ValueError, match="cold and warm runs have no common figure"):
        summary([RUN, replace(RUN, kind="warm")])
    with pytest.raises(ValueError, match="no runs"):
        summary([])


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("model", "fingerprint"), "00", "another model"),
        (("settings", "new_tokens"), 99, "new_tokens was 99, here 4"),
        (("settings", "precision"), "wide", "precision was wide, here highway"),
    ],
)
def test_reports_of_other_work_are_not_compared(
    report: Path, place: tuple[str, str], value: Any, message: str
):
    ours, other = read_report(report), read_report(report)
    other[place[0]][place[1]] = value
    with pytest.raises(ConfigError, match=message):
        compare(ours, other, "other.json")


def test_another_machine_is_told(report: Path):
    ours, other = read_report(report), read_report(report)
    other["machine"]["cpu"] = "another"
    found = compare(ours, other, "other.json")
    assert found["differences"] == {"cpu": ["another", ours["machine"]["cpu"]]}


def test_another_arena_and_another_way_to_launch_are_told(
    report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    other = read_report(report)
    other["settings"] |= {"arena_bytes": 3 << 20, "graph": "segment", "device_cache": 0}
    theirs = tmp_path / "other.json"
    theirs.write_text(json.dumps(other))
    assert headrace.main(["bench", "--from", str(report), "--compare", str(theirs)]) == 0
    told = capsys.readouterr().out
    assert "arena_bytes differs: 3145728 there, not given here" in told
    assert "graph differs: segment there, auto here" in told
    assert "device_cache differs: 0 there, not given here" in told


def test_no_piece_of_a_text_comes_twice():
    settings = Settings(prompt_tokens=2, new_tokens=2, repeats=2, warm_ups=1, seed=7)
    texts = Texts("".join(chr(0x4E00 + place) for place in range(16 * 5)), settings)
    places = texts._places
    assert len(set(places)) == 5
    assert all(place % 16 == 0 for place in places)
    assert Texts("x" * 200, settings)._places != Texts("x" * 200, replace(settings, seed=8))._places
    with pytest.raises(ConfigError, match="give --text FILE"):
        Texts("x" * 79, settings)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--repeats", "0"), "--repeats: 0 is not from 1"),
        (("--new-tokens", "1"), "--new-tokens: 1 is not from 2"),
        (("--compare", "/nonexistent"), "/nonexistent: cannot be read as a report: no such file\n"),
        (("--report", "/proc/nope/x.json"), "--report /proc/nope/x.json: cannot be written"),
        (("--text", "/nonexistent"), "--text: /nonexistent: cannot be read: no such file\n"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
):
    assert headrace.main(["bench", *QUICK, *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{}", '{"format": 2}', '{"format": 1}', "no json"])
def test_what_is_no_report_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="report"):
        read_report(path)
