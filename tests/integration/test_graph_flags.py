"""`--graph` and what shows it, in `headrace generate` and in the service."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import headrace
from tests.support.serving import serving

PLAY = "0,209,711,63,1288,278"
BODY = {"messages": [{"role": "user", "content": "Who goes there?"}], "max_tokens": 4}


def generated(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[dict[str, Any], list[str]]:
    """The object of `headrace generate --json`, and the lines on standard error."""
    own = ("--prompt-ids", PLAY, "--temperature", "0", "--max-tokens", "5", "--arena", "3000000")
    status = headrace.main(["generate", "--json", *own, *flags])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return json.loads(captured.out.splitlines()[-1]), captured.err.splitlines()


@pytest.mark.slow
def test_segments_are_traced_counted_and_timed_and_write_what_eager_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    eager, traced = generated(capsys, "--graph", "eager", "--trace-hash")
    flags = ("--graph", "segment", "--trace-hash", "--graph-log", "--timings")
    segment, lines = generated(capsys, *flags, "--device-cache", "2MiB")
    assert segment["ids"] == eager["ids"]
    of_place = {(line.split()[1], line.split()[3].split("..")[1]): line for line in traced}
    hashes = [line for line in lines if line.startswith("position ")]
    assert hashes
    for line in hashes:
        _, position, _, layers, *rest = line.split()
        assert of_place[position, layers.split("..")[1]].split()[4:] == rest
    assert any(line.startswith("miss: position ") for line in lines)
    assert any(line.startswith("graphs: ") for line in lines)
    assert sum(line.startswith("timings: position ") for line in lines) == 4


@pytest.mark.slow
def test_nothing_is_printed_that_was_not_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    _, lines = generated(capsys, "--graph", "segment")
    assert not [line for line in lines if re.match(r"position|miss|graphs|timings", line)]


@pytest.mark.slow
def test_routes_are_checked_and_picks_foretold_without_changing_a_token(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    eager, _ = generated(capsys, "--graph", "eager")
    path = tmp_path / "guesses"
    flags = ("--check-routes", "--lookahead", "2", "--predict-trace", str(path), "--graph-log")
    layered, lines = generated(capsys, "--graph", "layer", *flags)
    assert layered["ids"] == eager["ids"]
    counts = [line for line in lines if line.startswith("graphs: ")][-1]
    assert re.search(r", \d+ routes checked, \d+ hints$", counts)
    assert headrace.main(["simulate", "--predictions", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["n_tokens"] == 4
    assert [one["distance"] for one in facts["distances"]] == [1, 2, 3]
    assert all(0 < one["recall"] < 1 for one in facts["distances"])


@pytest.mark.slow
def test_the_service_logs_them_and_counts_them(runtime_dir: Path) -> None:
    flags = ("--graph", "segment", "--trace-hash", "--graph-log", "--timings")
    with serving(runtime_dir, *flags) as served:
        assert served.ask("/v1/chat/completions", BODY).status == 200
        metrics = served.ask("/metrics").body.decode()
        state = served.ask("/v1/headrace/state").json
        log = served.log.read_text()
    assert re.search(r"^position \d+ layers 0\.\.7 streams [0-9a-f]{16}", log, re.MULTILINE)
    assert re.search(r"^timings: position \d+: ", log, re.MULTILINE)
    assert re.search(r"^graphs: ", log, re.MULTILINE)
    found = dict(re.findall(r"^headrace_graph_(\w+)_total ([0-9.]+)$", metrics, re.MULTILINE))
    assert float(found["launches"]) >= 4
    assert float(found["launches"]) == float(found["eager"]) + float(found["replays"])
    assert state["compute"]["graph_mode"] == "segment"


@pytest.mark.slow
@pytest.mark.parametrize(
    "filters",
    [pytest.param((), marks=pytest.mark.accept), ("--top-p", "0.95", "--top-k", "300")],
)
def test_drawn_ids_are_the_same_in_every_mode(
    filters: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = ("--temperature", "0.9", "--seed", "3", "--precision", "highway", *filters)
    ids = [
        generated(capsys, *drawn, "--graph", mode)[0]["ids"]
        for mode in ("plain", "eager", "segment")
    ]
    assert ids[0] == ids[1] == ids[2] != generated(capsys)[0]["ids"]
