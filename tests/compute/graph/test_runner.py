"""A step by launches: what the model's own forward gives, whatever was missing on the way."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from compute.graph.hashes import Tracer
from compute.model.sequence import Sequence
from tests.support.decode_rig import CONTEXT, Rig, demo, demo_model, make_rig, wanted
from tests.support.in_turn import in_turn

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PROMPT = [3, 911, 17, 2045, 88, 640, 1201, 5, 77, 3001, 12]


def same_state(one: Rig, other: Rig) -> bool:
    pairs = zip(one.state(), other.state(), strict=True)
    return all(np.array_equal(left, right) for left, right in pairs)


def leaves(made: Rig, state: list[np.ndarray]) -> bool:
    return all(map(np.array_equal, made.state(), state))


def rig_without_a_pick(layer: int) -> tuple[Rig, np.ndarray]:
    """Return a rig that has taken 7 in and since lost a pick of the layer, and its picks."""
    made = make_rig(mode="segment", boundaries="whole")
    made.prefill(PROMPT)
    made.runner.step(7)
    picks = made.runner._headers.all_picks()
    made.daemon.drop(layer, int(picks[layer, 0]))
    made.experts.take_changes()
    return made, picks


def noted(call: Callable[..., Any], name: str, events: list[str]) -> Callable[..., Any]:
    """What does the same and notes that it did."""

    def instead(*args: Any, **more: Any) -> Any:
        events.append(name)
        return call(*args, **more)

    return instead


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["highway", "vendor", "wide"])
def test_a_step_gives_the_logits_of_the_models_forward(device: str, precision: str) -> None:
    made = make_rig(device, precision=precision, mode="eager")
    model = demo_model("cpu", precision)
    plain = Sequence(model.config, CONTEXT, model.device, model.precision)
    other = make_rig("cpu", precision=precision, mode="eager")
    made.prefill(PROMPT)
    model.forward(plain, PROMPT, other.experts, other.experts)
    token = 42
    for _ in range(12):
        wanted = model.forward(plain, [token], other.experts, other.experts)[0]
        made.runner.step(token)
        found = torch.from_numpy(made.runner.logits())
        token = int(wanted.argmax())
        # Another order of summation moves values over a rounding's edge, by design of fp8: two ids
        # that are as likely as each other may change places.
        near = 0.3 * wanted.std()
        assert (found - wanted).abs().max() < near
        assert made.runner.likeliest() == int(found.argmax())
        assert wanted[token] - wanted[made.runner.likeliest()] < near


@pytest.mark.parametrize("device", DEVICES)
@in_turn(mode=["layer", "segment", "oracle"], boundaries=["auto", "whole", "source-layers"])
def test_every_mode_leaves_the_bytes_of_the_eager_one(
    device: str, mode: str, boundaries: str
) -> None:
    eager, made = wanted(device, (*PROMPT,), 8), make_rig(device, mode=mode, boundaries=boundaries)
    made.prefill(PROMPT)
    assert made.greedy(8) == eager.ids
    assert leaves(made, eager.state)
    assert made.runner.counters.replays > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n_steps", [1, 2])  # at odd and even positions
def test_a_miss_at_any_layer_changes_no_byte(device: str, n_steps: int) -> None:
    eager, made = (
        make_rig(device, mode="eager"),
        make_rig(device, mode="segment", boundaries="whole"),
    )
    n_layers = demo().config.n_layers
    cases: list[tuple[int, ...]] = [(layer,) for layer in range(n_layers)]
    pairs = list(combinations(range(n_layers), 2))
    cases += pairs if device == "cuda" else pairs[n_steps::5]
    for one in (eager, made):
        one.prefill(PROMPT)
    eager.greedy(n_steps)
    made.greedy(n_steps)
    token = 1234
    for layers in cases:
        eager.runner.step(token)
        picks = eager.runner._headers.all_picks()
        for layer in layers:
            made.daemon.drop(layer, int(picks[layer, layer % 6]))
        made.experts.take_changes()
        made.daemon.asked.clear()
        made.runner.step(token)
        assert [asked[0] for asked in made.daemon.asked] == list(layers)
        assert made.runner.likeliest() == eager.runner.likeliest()
        assert same_state(made, eager), layers
        token = eager.runner.likeliest()


SIZES = [(0, 14), (7, 90), (100, 14), (256, 90)]
OTHER_SIZES = [(0, 90), (7, 14), (100, 90), (256, 14)]


@pytest.mark.parametrize(
    ("device", "n_device", "n_slots"),
    [
        *(("cpu", *sizes) for sizes in SIZES),
        *(pytest.param("cpu", *sizes, marks=pytest.mark.accept) for sizes in OTHER_SIZES),
        *(pytest.param("cuda", *sizes, marks=pytest.mark.gpu) for sizes in SIZES + OTHER_SIZES),
    ],
)
def test_no_byte_depends_on_the_sizes_of_the_tiers(
    device: str, n_device: int, n_slots: int
) -> None:
    eager = wanted(device, (*PROMPT,), 10)
    made = make_rig(device, mode="segment", n_slots=n_slots, n_device=n_device)
    made.prefill(PROMPT)
    assert made.greedy(10) == eager.ids
    assert leaves(made, eager.state)
    assert made.experts.io.misses > 0
    assert (made.experts.cache.n_promoted > 0) == (n_device > 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n_device", [0, 100])
def test_no_byte_depends_on_slots_that_a_request_leaves_open(device: str, n_device: int) -> None:
    """What runs again may still read them while they are overwritten."""
    nan: list[bool] = []
    eager = wanted(device, (*PROMPT,), 6)
    made = make_rig(device, mode="segment", boundaries="whole", n_device=n_device)
    made.prefill(PROMPT)
    made.daemon.spoils = True
    if device == "cpu":  # where the rest has ended by then: it runs once more, on what is left
        n_layers, step = demo().config.n_layers, made.runner._step

        def run_rest(layer: int) -> None:
            step.layers(layer + 1, n_layers)
            step.head()
            nan.append(bool(step.buffers.logits.isnan().any()))

        made.daemon.once_spoiled = run_rest
    made.daemon.drop(0, 0)  # an arena that has all asks for nothing
    made.experts.take_changes()
    assert made.greedy(6) == eager.ids
    assert leaves(made, eager.state)
    assert len(made.daemon.asked) > 6
    assert device != "cpu" or any(nan)


def test_what_oracle_compares_counts_neither_as_a_hit_nor_as_a_miss() -> None:
    counted = []
    for mode in ("segment", "oracle"):
        made = make_rig(mode=mode, boundaries="whole", n_slots=14)
        made.prefill(PROMPT)
        io = made.experts.io
        before = io.hits
        made.greedy(4)
        counted.append((io.hits - before, made.runner.counters.misses))
    (hits, misses), (own_hits, all_misses) = counted
    n_picks = 4 * demo().config.n_layers * demo().config.top_k
    assert 0 <= own_hits <= n_picks
    assert abs(own_hits - hits) < n_picks // 4  # what was compared may have evicted others
    assert all_misses > misses


def test_a_request_leaves_before_the_rest_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = rig_without_a_pick(3)
    runner, events = made.runner, made.daemon.events
    for owner, name in ((runner, "_wait"), (runner, "_expect"), (runner._launches, "again")):
        monkeypatch.setattr(owner, name, noted(getattr(owner, name), name.strip("_"), events))
    events.clear()
    runner.sequence.position -= 1
    runner.step(7)
    at = events.index("miss")
    assert "wait" not in events[:at]  # nothing before it: the answer takes longer than the rest
    # Headers are blanked, and the rest launched, when nothing writes headers any more.
    assert [e for e in events[at:] if e != "ack"] == [*("miss", "wait", "expect", "again", "wait")]


def test_where_no_request_left_the_rest_is_waited_for_before_it_runs_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pick may lie in a chunk that was not registered yet: then nobody else has waited."""
    made, _ = rig_without_a_pick(3)
    runner, events = made.runner, made.daemon.events
    fetch = made.experts.fetch

    def silent(layer: int, picks: list[int], _rest: object) -> bool:
        assert fetch(layer, picks)
        return False

    monkeypatch.setattr(made.experts, "fetch", silent)
    for owner, name in ((runner, "_wait"), (runner, "_expect"), (runner._launches, "again")):
        monkeypatch.setattr(owner, name, noted(getattr(owner, name), name.strip("_"), events))
    events.clear()
    runner.sequence.position -= 1
    runner.step(7)
    after = [event for event in events[events.index("miss") :] if event != "ack"]
    assert after == ["miss", "wait", "expect", "again", "wait"]


@pytest.mark.parametrize("watch", ["oracle", "tracer", "checks"])
def test_who_looks_at_a_segments_end_sees_one_that_has_ended(
    watch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    settings = {
        "oracle": {"mode": "oracle"},
        "tracer": {"mode": "segment", "tracer": Tracer(lines.append)},
        "checks": {"mode": "segment", "checks": True},
    }[watch]
    made = make_rig(boundaries="source-layers", **settings)  # type: ignore[arg-type]
    made.prefill(PROMPT)
    runner, waits, repair = made.runner, list[str](), made.runner._repair_all
    monkeypatch.setattr(runner, "_wait", noted(runner._wait, "wait", waits))

    def repaired(*args: Any, **more: Any) -> int:
        waits.clear()
        found = repair(*args, **more)
        assert waits
        return found

    monkeypatch.setattr(runner, "_repair_all", repaired)
    runner.step(7)


@pytest.mark.parametrize("device", DEVICES)
def test_what_later_layers_miss_follows_the_request_as_hints(device: str) -> None:
    made = make_rig(device, mode="segment", boundaries="whole")
    made.prefill(PROMPT)
    made.runner.step(7)
    picks = made.runner._headers.all_picks()
    # The input of layer 2 is the same without what layer 1 misses only where nothing is missed.
    made.daemon.drop(6, int(picks[6, 0]))
    made.daemon.drop(7, int(picks[7, 5]))
    made.experts.take_changes()
    made.daemon.events.clear()
    made.runner.sequence.position -= 1
    made.runner.step(7)
    hinted = [(layer, expert) for _, layer, experts in made.daemon.hinted for expert in experts]
    assert [layer for layer, _, _, _ in made.daemon.asked] == [6, 7]
    assert set(hinted) <= {(7, int(picks[7, 5]))}
    events = made.daemon.events
    assert not hinted or events.index("miss") < events.index("hint")
    made.daemon.drop(0, int(picks[0, 0]))
    for expert in picks[1]:
        made.daemon.drop(1, int(expert))
    made.experts.take_changes()
    made.runner.sequence.position -= 1
    made.runner.step(7)
    assert any(layer == 1 for _, layer, _ in made.daemon.hinted)


def test_all_picks_of_a_layer_that_are_not_on_the_device_are_asked_for() -> None:
    made, picks = rig_without_a_pick(3)
    made.runner._step.sequence.position -= 1
    made.runner.step(7)
    (asked,) = made.daemon.asked
    assert asked[:2] == (3, tuple(picks[3].tolist()))


def test_a_steps_picks_are_told_once_it_is_done() -> None:
    made = make_rig(mode="segment")
    made.prefill(PROMPT)
    made.daemon.touched.clear()
    made.runner.step(7)
    made.runner.finish()
    ((_, keys),) = made.daemon.touched
    picks = made.runner._headers.all_picks()
    assert sorted(keys) == sorted(
        (layer, expert) for layer, row in enumerate(picks.tolist()) for expert in row
    )


def test_a_new_sequence_reads_nothing_of_the_old_one() -> None:
    made = make_rig(mode="segment")
    made.prefill(PROMPT[::-1] * 9, at_once=True)
    made.greedy(3)
    made.runner.finish()
    made.runner.sequence.reset()
    made.prefill(PROMPT)
    assert made.greedy(6) == wanted("cpu", (*PROMPT,), 6).ids


def test_the_oracle_names_the_first_byte_that_differs() -> None:
    made = make_rig(mode="oracle")
    made.prefill(PROMPT)
    made.runner.step(7)
    spoiled = made.runner._step._attention[5]
    run = spoiled.run
    calls = []

    def other_every_time() -> None:
        run()
        calls.append(1)
        made.runner._step.buffers.middle[5].add_(len(calls))

    spoiled.run = other_every_time  # type: ignore[method-assign]
    with pytest.raises(Exception, match=r"position 12.*layer 5, after its attention"):
        made.runner.step(8)
