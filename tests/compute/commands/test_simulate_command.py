"""`headrace simulate` at the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from compute.commands import simulate, simulate_plot
from expert_daemon.routing_trace import TraceShape
from expert_daemon.synthetic_trace import RECIPES, synthetic_trace
from expert_daemon.trace_file import read_trace, write_trace

ROOT = Path(__file__).resolve().parents[3]
SMALL = TraceShape(8, 96, 4, expert_bytes=400_000, slot_bytes=401_408)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "picks.trace"
    write_trace(path, synthetic_trace("skewed", 80, shape=SMALL))
    return str(path)


def run(capsys, *arguments):
    status = headrace.main(["simulate", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_trace_becomes_a_table(trace, capsys):
    status, out, err = run(capsys, trace, "--arena", "60MiB,50%", "--bandwidth", "7GB/s")
    assert (status, err) == (0, "")
    assert "80 tokens and 0 chunks through 8 layers of 96 experts, 4 picked" in out
    assert "The last 60 tokens count" in out
    assert [out.count(name) for name in ("lfu-da", "lru-random", "optimum")] == [2, 2, 2]
    assert "60.0 MiB" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_device_cache_has_its_column_and_fits_the_line(trace, capsys):
    status, out, _ = run(capsys, trace, "--arena", "30%", "--device", "20%")
    assert status == 0
    assert "A device cache of 154 experts" in " ".join(out.split())
    assert "device" in out
    assert max(map(len, out.splitlines())) <= 80


def test_json_is_the_last_line(trace, capsys):
    status, out, _ = run(capsys, trace, "--arena", "20%,40%", "--policy", "lru", "--json")
    facts = json.loads(out.splitlines()[-1])
    assert status == 0
    assert facts["n_tokens"] == 80
    assert facts["shared_with_previous"] == pytest.approx(0.39, abs=0.06)
    assert [one["policy"] for one in facts["results"]] == ["lru", "optimum"] * 2
    first = facts["results"][0]
    assert first["hit_rate"] == pytest.approx(1 - first["misses_per_token"] / 32)
    assert first["bytes_per_token"] == pytest.approx(first["misses_per_token"] * 400_000)
    assert set(first) >= {"n_slots", "stall_ms_per_token", "tokens_per_s_at_most", "arena_bytes"}


def test_a_made_up_trace_is_written_or_simulated_at_once(tmp_path, capsys):
    path = tmp_path / "made.trace"
    status, out, err = run(capsys, "--synthetic", "recent", "--tokens", "30", "--write", str(path))
    assert (status, out) == (0, "")
    assert "30 tokens" in err
    assert read_trace(path)[0].n_tokens == 30
    written = run(capsys, str(path), "--arena", "20%", "--json")[1]
    at_once = run(capsys, "--synthetic", "recent", "--tokens", "30", "--arena", "20%", "--json")[1]
    assert json.loads(written)["results"] == json.loads(at_once)["results"]


def test_a_checkpoint_gives_a_made_up_trace_its_shape(capsys):
    made = ("--synthetic", "flat", "--model", "demo", "--tokens", "40")
    facts = json.loads(run(capsys, *made, "--arena", "100%", "--json")[1])
    assert facts["n_experts"] != 384


def test_damage_is_told_and_the_rest_replayed(trace, capsys):
    data = Path(trace).read_bytes()
    Path(trace).write_bytes(data + b"torn")
    status, _, err = run(capsys, trace, "--arena", "50%", "--policy", "lru")
    assert status == 0
    assert "4 bytes at the end are no whole block" in " ".join(err.split())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "a TRACE, or --synthetic KIND"),
        (("TRACE", "--synthetic", "flat"), "a TRACE, or --synthetic KIND"),
        (("TRACE", "--tokens", "3"), "--tokens belongs to --synthetic"),
        (("TRACE", "--policy", "fifo"), "'fifo' is none of all, lfu-da, lru, lru-random"),
        (("TRACE", "--arena", "1KiB"), "smallest: "),
        (("TRACE", "--bandwidth", "fast"), "--bandwidth: 'fast' is not a size"),
        (("TRACE", "--bandwidth", "0"), "more than 0 bytes"),
        (("TRACE", "--latency-ms", "-1"), "--latency-ms: -1.0 is not a time"),
        (("TRACE", "--warm-up", "80"), "80 are for warming up"),
        (("TRACE", "--warm-up", "-1"), "--warm-up: -1 is not a number"),
        (("TRACE", "--plot", "x.txt"), "ends in .png"),
        (("TRACE", "--plot", "/nowhere/x.png"), "not a directory"),
        (("--synthetic", "flat", "--tokens", "0"), "--tokens: 0 is not a number"),
        (("/nowhere/x.trace",), "No such file"),
        ((__file__,), "not a routing trace"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(trace, capsys, arguments, text):
    arguments = [trace if argument == "TRACE" else argument for argument in arguments]
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert text in err


@pytest.mark.timeout(20)
@pytest.mark.parametrize("flags", [(), ("--predictions",)])
def test_a_pipe_is_refused_at_once(tmp_path, capsys, flags):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    status, out, err = run(capsys, *flags, str(pipe))
    assert (status, out) == (2, "")
    assert "not a plain file" in err


def test_a_plot_without_matplotlib_says_how_to_get_it(trace, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, out, err = run(capsys, trace, "--plot", str(tmp_path / "out.png"))
    assert (status, out) == (2, "")
    assert "pip install '.[plot]' in the clone" in err


def test_a_plot_has_a_curve_for_each_policy(trace, tmp_path, capsys, monkeypatch):
    drawn = []

    class Axes:
        def plot(self, sizes, rates, style, *, marker, label):
            drawn.append((label, list(sizes), list(rates), style))

        def set(self, **texts):
            assert "80 tokens" in texts["title"]

        def grid(self, **how):
            pass

        def legend(self):
            pass

    class Figure:
        def __init__(self, **how):
            pass

        def subplots(self):
            return Axes()

        def savefig(self, path, dpi):
            path.write_bytes(b"picture")

    monkeypatch.setattr(simulate_plot, "_figure_class", lambda: Figure)
    target = tmp_path / "out.svg"
    status, _, _ = run(capsys, trace, "--arena", "40%,20%", "--plot", str(target))
    assert status == 0
    assert target.read_bytes() == b"picture"
    assert [label for label, *_ in drawn] == ["lfu-da", "lru", "lru-random", "optimum"]
    assert all(sizes == sorted(sizes) and len(sizes) == 2 for _, sizes, _, _ in drawn)
    assert all(rates == sorted(rates) and rates[-1] <= 100 for _, _, rates, _ in drawn)
    assert [style for *_, style in drawn] == ["-", "-", "-", "--"]


def test_a_real_plot_is_drawn_where_matplotlib_is(trace, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    target = tmp_path / "out.png"
    assert run(capsys, trace, "--arena", "20%,40%", "--plot", str(target))[0] == 0
    assert target.read_bytes().startswith(b"\x89PNG")


def test_the_kinds_offered_are_those_that_can_be_made():
    assert set(simulate.KINDS) == set(RECIPES)


def test_simulating_imports_no_torch(trace):
    code = (
        "import sys, headrace\n"
        f"assert headrace.main(['simulate', {trace!r}, '--arena', '50%', '--json']) == 0\n"
        "raise SystemExit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0
