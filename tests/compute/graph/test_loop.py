"""The loop around a step: what is said when, and that a steady step leaves nothing behind."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch

from compute.graph.runner import Runner
from compute.sampler import Sampling
from tests.support.decode_rig import Rig, make_rig

PROMPT = [3, 911, 17, 2045, 88, 640]
N_STEPS = 200
MODES = ["eager", "layer", "segment"]
# Greedy, and drawn in either way.
SAMPLINGS = [None, Sampling(seed=2), Sampling(top_k=20, top_p=0.9, seed=3)]
# A device cache of a quarter of the experts: copies go beside nearly every step.
WAYS = pytest.mark.parametrize(
    ("n_device", "sampling"), [(0, None), *((64, sampling) for sampling in SAMPLINGS)]
)
FEWER_WAYS = pytest.mark.parametrize(
    ("n_device", "sampling"),
    [
        (0, None),
        *(pytest.param(64, sampling, marks=pytest.mark.accept) for sampling in SAMPLINGS[:-1]),
        (64, SAMPLINGS[-1]),
    ],
)


def launches_noted(rig: Rig) -> None:
    """Write launches and waits down among what the daemon is told."""
    launch, wait, events = rig.runner._launches._launch, rig.runner._wait, rig.daemon.events
    headers = rig.runner._headers.first_flagged

    def noted(*args: Any) -> None:
        events.append("launch")
        launch(*args)

    def waited() -> None:
        events.append("wait")
        wait()

    def looked(*args: Any) -> int:
        events.append("headers")
        return headers(*args)

    rig.runner._headers.first_flagged = looked  # type: ignore[assignment, method-assign]
    rig.runner._launches._launch = noted  # type: ignore[assignment, method-assign]
    rig.runner._wait = waited  # type: ignore[method-assign]


def test_a_segments_pieces_go_without_a_wait_and_then_the_token_before_is_told() -> None:
    made = make_rig(mode="segment", boundaries="whole")
    made.prefill(PROMPT)
    made.runner.step(7)
    launches_noted(made)
    for token in (8, 9):
        made.daemon.events.clear()
        made.runner.step(token)
        assert made.daemon.events == ["rows", *["launch"] * 4, "touch", "headers", "wait"]


def test_segments_follow_each_other_without_a_wait_and_the_host_speaks_meanwhile() -> None:
    made = make_rig(mode="segment", boundaries="source-layers")
    made.prefill(PROMPT)
    made.runner.step(7)
    launches_noted(made)
    made.daemon.events.clear()
    made.runner.step(8)
    first, second = ["launch", "launch", "touch", "headers"], ["launch", "launch", "headers"]
    rest = ["launch", "launch", "headers", "launch", "headers"]  # layers 5 to 7, 7
    assert made.daemon.events == ["rows", *first, *second, *rest, "wait"]


def test_a_request_for_experts_leaves_after_what_the_token_before_used() -> None:
    made = make_rig(mode="segment", boundaries="source-layers")
    made.prefill(PROMPT)
    made.runner.step(7)
    made.daemon.drop(0, int(made.runner._headers.all_picks()[0, 0]))
    made.runner.sequence.position -= 1  # the same picks once more
    made.daemon.events.clear()
    made.runner.step(7)
    events = [event for event in made.daemon.events if event in {"touch", "miss"}]
    assert events == ["touch", "miss"]


def test_picks_come_before_the_next_tokens_misses_and_under_their_own_step() -> None:
    made = make_rig(mode="segment", boundaries="whole")
    made.prefill(PROMPT)
    made.runner.step(7)
    first = made.daemon.touched[-1][0]
    picks = made.runner._headers.all_picks()
    made.daemon.drop(3, int(picks[3, 0]))
    made.daemon.events.clear()
    made.runner.step(7)
    assert made.daemon.events[:3] == ["rows", "ack", "touch"]
    assert made.daemon.touched[-1][0] == first + 1
    made.runner.finish()
    assert [step for step, _ in made.daemon.touched[-2:]] == [first + 1, first + 2]


def test_the_last_tokens_picks_are_told_at_the_requests_end_and_once() -> None:
    made = make_rig(mode="segment")
    made.prefill(PROMPT)
    made.runner.step(7)
    n_told = len(made.daemon.touched)
    made.runner.finish()
    made.runner.finish()
    assert len(made.daemon.touched) == n_told + 1


def test_the_daemons_changes_are_acknowledged_before_a_step_launches_anything() -> None:
    made = make_rig(mode="segment", boundaries="whole")
    made.prefill(PROMPT)
    made.runner.step(7)
    launches_noted(made)
    made.daemon.drop(0, 0)
    made.daemon.events.clear()
    made.runner.step(8)
    assert made.daemon.events[:3] == ["rows", "ack", "launch"]
    assert made.daemon.applied == made.daemon.version


def test_rows_are_asked_for_as_soon_as_the_token_is_known() -> None:
    early, late = make_rig(mode="segment"), make_rig(mode="segment")
    for made in (early, late):
        made.prefill(PROMPT)
    ids = early.runner.sequence.last_ids.copy()
    early.daemon.events.clear()
    early.runner.expect(7)
    assert early.daemon.events == ["rows"]
    assert (early.runner.sequence.last_ids == ids).all()
    early.runner.step(7)
    assert early.daemon.events.count("rows") == 1
    late.runner.step(7)
    assert (early.runner.logits() == late.runner.logits()).all()


def test_a_token_that_was_expected_and_did_not_come_leaves_no_trace() -> None:
    made, plain = make_rig(mode="segment"), make_rig(mode="segment")
    for one in (made, plain):
        one.prefill(PROMPT)
    made.runner.expect(99)
    made.runner.step(7)
    plain.runner.step(7)
    made.runner.expect(100)
    made.runner.finish()
    made.runner.step(8)
    plain.runner.step(8)
    assert (made.runner.logits() == plain.runner.logits()).all()


def steps(made: Rig, n: int, token: int = 42, sampling: Sampling | None = None) -> int:
    """Greedy or drawn steps; what the test's daemon writes down is thrown away."""
    for _ in range(n):
        made.runner.step(token, sampling)
        token = made.runner.likeliest() if sampling is None else made.runner.drawn()
        made.runner.expect(token)
        for noted in (made.daemon.touched, made.daemon.asked, made.daemon.events):
            noted.clear()
    return token


@FEWER_WAYS
@pytest.mark.parametrize("mode", MODES)
def test_pythons_blocks_do_not_grow(mode: str, n_device: int, sampling: Sampling | None) -> None:
    """The loop's own: references that stand in for kernels on the CPU keep some for a while."""
    made = make_rig(mode=mode, n_device=n_device)
    made.prefill(PROMPT)
    steps(made, 8, sampling=sampling)
    made.runner._launches._launch = lambda *_: None  # type: ignore[method-assign]
    made.runner._headers.expect = lambda *_: None  # type: ignore[method-assign]
    grown = []
    for _ in range(3):  # what comes once is in one of them, a leak in all
        made.runner.finish()
        made.runner.sequence.reset()
        made.prefill(PROMPT[:2])
        token = steps(made, 60, sampling=sampling)
        gc.collect()
        before = sys.getallocatedblocks()
        steps(made, N_STEPS, token, sampling)
        gc.collect()
        grown.append(sys.getallocatedblocks() - before)
    assert min(grown) < N_STEPS // 2, grown  # a leak is one a step


@pytest.mark.gpu
@WAYS
@pytest.mark.parametrize("mode", MODES)
def test_pythons_blocks_do_not_grow_on_a_device(
    mode: str, n_device: int, sampling: Sampling | None
) -> None:
    made = make_rig("cuda", mode=mode, n_device=n_device)
    made.prefill(PROMPT)
    token = steps(made, 60, sampling=sampling)
    grown = []
    for _ in range(3):  # what comes once is in one of them, a leak in all
        made.runner.finish()
        made.runner.sequence.reset()
        made.prefill(PROMPT)
        gc.collect()
        before = sys.getallocatedblocks()
        token = steps(made, N_STEPS, token, sampling)
        gc.collect()
        grown.append(sys.getallocatedblocks() - before)
    assert min(grown) < N_STEPS // 2, grown  # a leak is one a step


@pytest.mark.gpu
@WAYS
@pytest.mark.parametrize("mode", MODES)
def test_a_steady_step_allocates_nothing_on_the_device(
    mode: str, n_device: int, sampling: Sampling | None
) -> None:
    made = make_rig("cuda", mode=mode, n_device=n_device)
    made.prefill(PROMPT)
    token = steps(made, 60, sampling=sampling)
    torch.cuda.synchronize()
    counts = ["segment.all.allocated", "num_device_alloc", "num_alloc_retries"]
    if mode != "eager":  # single launches take their intermediates from the caching allocator
        counts.append("allocation.all.allocated")
    before = {name: torch.cuda.memory_stats()[name] for name in counts}
    reserved = torch.cuda.memory_reserved()
    steps(made, N_STEPS, token, sampling)
    assert {name: torch.cuda.memory_stats()[name] for name in counts} == before
    assert torch.cuda.memory_reserved() == reserved


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("boundaries", ["auto", "whole"])
@WAYS
def test_a_steady_step_waits_for_headers_alone(
    mode: str,
    boundaries: str,
    n_device: int,
    sampling: Sampling | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = make_rig("cuda", mode=mode, boundaries=boundaries, n_device=n_device)
    made.prefill(PROMPT)
    token = steps(made, 20, sampling=sampling)
    waits, wait = [], Runner._wait

    def allowed(runner: Runner) -> None:
        torch.cuda.set_sync_debug_mode("default")
        try:
            wait(runner)
            waits.append(1)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(Runner, "_wait", allowed)
    try:
        torch.cuda.set_sync_debug_mode("error")
        steps(made, 10, token, sampling)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == 10  # one at a token's end
