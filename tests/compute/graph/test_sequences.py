"""Several sequences, pointers that change under the graphs, captures that fail."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from compute.experts.request_io import Waiting
from compute.graph.exactness import Decoded
from compute.graph.recording import Launch, Recorder
from compute.graph.runner import Runner
from compute.model.sequence import Sequence
from protocol.errors import CaptureError, DaemonLost
from tests.support.arena_daemon import ArenaDaemon
from tests.support.decode_rig import (
    CONTEXT,
    Rig,
    beside,
    demo,
    demo_model,
    make_experts,
    make_rig,
    wanted,
)
from tests.support.in_turn import in_turn

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PROMPTS = [[3, 911, 17, 2045, 88], [640, 1201, 5]]


@pytest.mark.parametrize("disturbs", ["another sequence", "a prompt"])
def test_rows_that_were_asked_for_and_dropped_are_asked_for_again(disturbs: str) -> None:
    first, plain = make_rig(mode="segment"), make_rig(mode="segment")
    second = beside(first, mode="segment")
    for made in (first, second, plain):
        made.prefill(PROMPTS[0])
    first.runner.expect(42)
    if disturbs == "a prompt":
        first.prefill([5])
        plain.prefill([5])
    else:
        second.runner.expect(43)
        second.runner.step(43)
    for token in (42, 44):
        first.runner.step(token)
        plain.runner.step(token)
    assert (first.runner.logits() == plain.runner.logits()).all()


def token(made: Rig, noted: Decoded) -> None:
    noted.ids += made.greedy(1, noted.ids[-1] if noted.ids else 42)
    noted.token(made.runner.sequence.position - 1, demo().config.n_layers, made.runner.buffers)


@cache
def each_alone(device: str) -> list[Decoded]:
    alone = [Decoded(), Decoded()]
    for prompt, noted in zip(PROMPTS, alone, strict=True):
        eager = make_rig(device, mode="eager")
        eager.prefill(prompt)
        for _ in range(8):
            token(eager, noted)
    return alone


@pytest.mark.parametrize("device", DEVICES)
@in_turn(mode=["layer", "segment"], n_slots=[256, 60])
def test_two_sequences_in_turn_are_as_each_of_them_alone(
    device: str, mode: str, n_slots: int
) -> None:
    """Every layer's streams of every token, seen once the token has ended."""
    alone, found = each_alone(device), [Decoded(), Decoded()]
    first = make_rig(device, mode=mode, n_slots=n_slots, n_device=20)
    rigs = [first, beside(first, mode=mode)]
    for made, prompt in zip(rigs, PROMPTS, strict=True):
        made.prefill(prompt)
    for _ in range(8):
        for made, noted in zip(rigs, found, strict=True):
            token(made, noted)
    assert [own.difference(other) for own, other in zip(found, alone, strict=True)] == ["", ""]
    assert [len(own.hashes) for own in found] == [8 * demo().config.n_layers] * 2
    assert all(made.runner.counters.replays for made in rigs)


@pytest.mark.parametrize("device", DEVICES)
def test_one_memory_given_from_sequence_to_sequence_shows_none_of_the_last_one(
    device: str,
) -> None:
    made = make_rig(device, mode="segment")
    for _ in range(2):
        for prompt in PROMPTS:
            made.runner.finish()
            made.runner.sequence.reset()
            made.prefill(prompt)
            fresh = wanted(device, (*prompt,), 4)
            assert made.greedy(4) == fresh.ids
            assert all(map(np.array_equal, made.state(), fresh.state))
    assert made.runner.counters.recaptures == 0


@pytest.mark.parametrize("what", ["the sequence", "the arena"])
def test_a_pointer_that_changed_has_every_graph_captured_anew(what: str) -> None:
    made, plain = make_rig(mode="segment"), make_rig(mode="eager")
    for one in (made, plain):
        one.prefill(PROMPTS[0])
    ids = made.greedy(3)
    counters = made.runner.counters
    n_recorded, n_captures = len(made.runner._launches._recorder._recordings), counters.captures
    if what == "the sequence":
        made.runner.sequence.windows[3] = made.runner.sequence.windows[3].clone()
    else:
        made.experts.places.addresses = made.experts.places.addresses.clone()
    ids += made.greedy(3, ids[-1])
    assert counters.reasons == {what: n_recorded}
    assert counters.recaptures == n_recorded
    assert counters.captures > n_captures
    if what == "the arena":
        assert ids == plain.greedy(6)


class Heir:
    """A client whose daemon dies in a request; the next one has another arena."""

    def __init__(self, first: ArenaDaemon, second: ArenaDaemon) -> None:
        self.__dict__.update(now=first, after=second, dies=False)
        second.welcome = replace(second.welcome, arena_id=b"b" * 16)

    def miss(self, *args: Any, **more: Any) -> Any:
        if self.dies:
            raise DaemonLost("it was killed")
        return self.now.miss(*args, **more)

    def reconnect(self, timeout_ms: int) -> None:
        self.__dict__.update(now=self.after, dies=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["now"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            setattr(self.now, name, value)


@pytest.mark.parametrize(
    ("device", "boundaries", "n_slots"),
    [
        ("cpu", "auto", 90),
        pytest.param("cpu", "whole", 256, marks=pytest.mark.accept),
        pytest.param("cpu", "auto", 256, marks=pytest.mark.accept),
        pytest.param("cpu", "whole", 90, marks=pytest.mark.accept),
        *(
            pytest.param("cuda", boundaries, n_slots, marks=pytest.mark.gpu)
            for boundaries in ("auto", "whole")
            for n_slots in (256, 90)
        ),
    ],
)
def test_an_arena_that_changes_within_a_step_is_not_read_through_old_graphs(
    device: str, boundaries: str, n_slots: int
) -> None:
    eager = wanted(device, (*PROMPTS[0],), 24)
    model = demo_model(device)
    heir = Heir(ArenaDaemon(demo(), 120, full=False), ArenaDaemon(demo(), n_slots, full=False))
    experts = make_experts(heir, demo(), 0, model.device)  # type: ignore[arg-type]
    experts.waiting = Waiting(daemon_wait_s=5)
    sequence = Sequence(model.config, CONTEXT, model.device, model.precision)
    runner = Runner(model, sequence, experts, mode="segment", boundaries=boundaries)
    made = Rig(model, heir.now, experts, runner)
    made.prefill(PROMPTS[0])
    ids = made.greedy(12)
    heir.dies = True
    ids += made.greedy(12, ids[-1])
    assert not heir.dies
    assert ids == eager.ids
    assert runner.counters.recaptures > 0
    assert "the arena" in runner.counters.reasons


@pytest.mark.parametrize("device", DEVICES)
@in_turn(mode=["layer", "segment", "oracle"], n_before=[0, 1])
def test_a_capture_that_fails_costs_graphs_and_no_token(
    device: str,
    mode: str,
    n_before: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    eager = wanted(device, (*PROMPTS[0],), 6)
    captured, calls = Recorder._captured, []

    def failing(recorder: Recorder, launch: Launch) -> Launch:
        calls.append(1)
        if len(calls) > n_before:
            raise CaptureError("out of memory")
        return captured(recorder, launch)

    monkeypatch.setattr(Recorder, "_captured", failing)
    made = make_rig(device, mode=mode)
    made.prefill(PROMPTS[0])
    assert made.greedy(6) == eager.ids
    assert all(map(np.array_equal, made.state(), eager.state))
    counters = made.runner.counters
    assert (counters.failures, len(calls)) == (1, n_before + 1)
    assert len(caplog.records) == 1
    if mode == "layer":
        assert made.runner.mode == "layer"
        assert counters.replays == 5 * n_before
    else:
        assert made.runner.mode == "eager"
        assert counters.replays == 0
