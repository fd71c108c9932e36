"""The performance model's predictions, held to runs of the demo whose reads are made slow.

Waits of 20 ms and more; medians of five runs of new content; within 15 %. What compute and the
daemon themselves take on this machine is measured beside, text by text, with everything in memory
and with reads as fast as they are. The daemons are processes of their own, as drives are.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from compute.commands.opening import Opened, opened
from compute.commands.plan.fit import setting_of, work_of
from compute.commands.plan.rates import Drive, chunk_s, distinct_experts, replayed_disk_s
from compute.commands.terminal import Display
from compute.config import ComputeConfig
from compute.sampler import Sampling
from compute.session import Finished, Request
from expert_daemon.burst_sizes import bursts_of
from expert_daemon.routing_trace import RoutingTrace
from expert_daemon.simulate import Setting
from expert_daemon.trace_file import read_trace
from protocol.files.checkpoint import Checkpoint, open_checkpoint
from tests.support.slow_daemon import slow_daemon

N_NEW = 8
N_RUNS = 5
N_PROMPT = 40
WITHIN = 0.15
CALM = 1.3  # time over processor's time, where nothing is waited for


@dataclass(frozen=True)
class Run:
    first_s: float  # to the first token
    token_s: float
    busy: float  # what all of it took, over the processor's time of it


def prompts(ready: Opened) -> list[list[int]]:
    """One to warm up, and new content for each run."""
    text = (ready.checkpoint.directory / "heldout.txt").read_text(encoding="utf-8")
    pieces = [text[20_000 * number :][: 8 * N_PROMPT] for number in range(N_RUNS + 1)]
    return [[ready.bos_id, *ready.tokenizer.encode(piece)][:N_PROMPT] for piece in pieces]


def run(ready: Opened, ids: list[int]) -> Run:
    """A text on an engine."""
    request = Request(ids, Sampling(temperature=0), N_NEW)
    began = time.process_time()
    *_, last = ready.engine.generate(request)
    cpu_s = time.process_time() - began
    assert isinstance(last, Finished)
    assert last.n_new == N_NEW
    busy = (last.prefill_s + last.decode_s) / cpu_s
    return Run(last.prefill_s, last.decode_s / (N_NEW - 1), busy)


@dataclass(frozen=True)
class Measurement:
    """The same texts thrice: all experts there, traced in an arena, and in that with slow reads."""

    checkpoint: Checkpoint
    setting: Setting
    trace: RoutingTrace
    resident: list[Run]
    quick: list[Run]  # in the arena, reads as fast as they are
    measured: list[Run]


def measure(demo_dir: Path, folder: Path, arena: int, latency_s: float) -> Measurement:
    """Each text on three daemons in turn, so that what else the machine does counts for all."""
    places = [folder / name for name in ("resident", "quick", "measured")]
    small = ("--arena", str(arena))
    trace_file = folder / "trace"
    with contextlib.ExitStack() as stack:
        stack.enter_context(slow_daemon(demo_dir, places[0], 0.0))
        stack.enter_context(
            slow_daemon(demo_dir, places[1], 0.0, *small, "--trace", str(trace_file))
        )
        stack.enter_context(slow_daemon(demo_dir, places[2], latency_s, *small))
        configs = [ComputeConfig(runtime_dir=place, daemon_wait_s=20) for place in places]
        ready = [stack.enter_context(opened(each, Display(quiet=True))) for each in configs]
        texts = prompts(ready[0])
        for ids in texts:  # whatever it needs is there from now on
            run(ready[0], ids)
        runs = [[run(each, ids) for each in ready] for ids in texts][1:]
    trace, _ = read_trace(trace_file)
    checkpoint = open_checkpoint(demo_dir)
    resident, quick, measured = (list(column) for column in zip(*runs, strict=True))
    return Measurement(checkpoint, setting_of(checkpoint, arena), trace, resident, quick, measured)


def predicted_tokens(found: Measurement, drive: Drive) -> list[float]:
    """A token's time in each run, from the trace."""
    work, trace = work_of(found.checkpoint), found.trace
    bursts = bursts_of(trace, found.setting)
    tokens = np.flatnonzero(trace.is_token)
    assert len(tokens) == (N_RUNS + 1) * (N_NEW - 1)
    compute_s = statistics.median(run.token_s for run in found.resident)
    quick_s = statistics.median(run.token_s for run in found.quick)
    n_bursts = np.isin(bursts.step, tokens).sum() / len(tokens)
    drive = replace(drive, request_s=max(0.0, quick_s - compute_s) / n_bursts)
    return [
        compute_s + replayed_disk_s(drive, work, bursts.of(steps)) / len(steps)
        for steps in tokens.reshape(N_RUNS + 1, -1)[1:]
    ]


def predicted_first_tokens(found: Measurement, drive: Drive) -> list[float]:
    """The time to each run's first token, from what its prompt misses by the trace."""
    work, trace = work_of(found.checkpoint), found.trace
    bursts = bursts_of(trace, found.setting)
    compute_s = statistics.median(run.first_s for run in found.resident)
    quick_s = statistics.median(run.first_s for run in found.quick)
    drive = replace(drive, request_s=max(0.0, quick_s - compute_s) / work.n_layers)
    n_picked = distinct_experts(work, N_PROMPT)
    times = []
    for step in np.flatnonzero(~trace.is_token).tolist()[1:]:
        n_missing = float(bursts.of(np.array([step])).sum()) / work.n_layers
        times.append(chunk_s(work, drive, n_picked, n_missing, compute_s))
    assert len(times) == N_RUNS
    return times


def ratios(found: Measurement, latency_s: float) -> dict[str, float]:
    """Predicted over measured, medians of both."""
    drive = Drive(bytes_per_s=1e9, latency_s=latency_s, n_threads=8)
    tokens, firsts = predicted_tokens(found, drive), predicted_first_tokens(found, drive)
    median = statistics.median
    return {
        "token": median(tokens) / median(run.token_s for run in found.measured),
        "first token": median(firsts) / median(run.first_s for run in found.measured),
    }


def check(demo_dir: Path, folder: Path, arena: int, latency_s: float) -> None:
    """Hold one try of three; a miss counts only where the machine had time for the run.

    With every expert there nothing is waited for: what that took beyond the processor's time of it
    went to others, and then predictions from it say nothing of the waits.
    """
    missed = []
    for number in range(3):
        place = folder / str(number)
        place.mkdir(mode=0o700)
        found = measure(demo_dir, place, arena, latency_s)
        told = ratios(found, latency_s)
        busy = statistics.median(run.busy for run in found.resident)
        print(f"predicted over measured: {told}; time over processor's time: {busy:.2f}")
        if all(abs(ratio - 1) <= WITHIN for ratio in told.values()):
            return
        if busy <= CALM:
            missed.append(told)
    if not missed:
        pytest.skip("others use this machine: not once was there time for the run")
    raise AssertionError(missed)


@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_tokens_and_first_tokens_take_as_long_as_predicted(demo_dir: Path, runtime_dir: Path):
    check(demo_dir, runtime_dir, arena=3_000_000, latency_s=0.02)


@pytest.mark.timing
@pytest.mark.accept
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("arena", "latency_s"),
    [(2_500_000, 0.1), (3_000_000, 0.03), (4_000_000, 0.04), (4_000_000, 0.06), (5_000_000, 0.12)],
)
def test_other_arenas_and_latencies_are_predicted_as_well(
    demo_dir: Path, runtime_dir: Path, arena: int, latency_s: float
):
    check(demo_dir, runtime_dir, arena, latency_s)
