"""Ids drawn by launches: the host's, whatever the mode and whatever was missing on the way."""

from __future__ import annotations

import pytest
import torch

from compute.graph.timings import StepTimer
from compute.sampler import Sampling, choose
from protocol.errors import ShardError
from tests.support.decode_rig import Rig, make_rig

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MODES = ["eager", "layer", "segment", "oracle"]
PROMPT = [3, 911, 17, 2045, 88]
WISHES = [
    Sampling(seed=4),
    Sampling(temperature=0.7, top_p=0.9, seed=2**64 - 1),
    Sampling(temperature=1.5, top_k=30, seed=7),
    Sampling(temperature=2, min_p=0.02),
    Sampling(temperature=1.2, top_k=3000, top_p=0.99, min_p=0.001, seed=1),
]


def ready(device: str = "cpu", **settings: object) -> Rig:
    made = make_rig(device, **settings)  # type: ignore[arg-type]
    made.prefill(PROMPT)
    return made


def drawn(made: Rig, n: int, token: int = 42) -> list[int]:
    """So many ids, each drawn with another of the wishes and taken in; all are the host's too."""
    ids = []
    for number in range(n):
        sampling = WISHES[number % len(WISHES)]
        made.runner.step(token, sampling)
        token = made.runner.drawn()
        position = made.runner.sequence.position
        assert token == choose(made.runner.logits(), position, sampling).id
        ids.append(token)
    return ids


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
def test_ids_are_the_hosts_and_every_modes(device: str, mode: str) -> None:
    found = drawn(ready(device, mode=mode), 12)
    assert found == drawn(ready(device, mode="eager"), 12)
    assert len(set(found)) > 6, "they are drawn"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("boundaries", ["whole", "source-layers"])
def test_a_miss_changes_no_drawn_id(device: str, boundaries: str) -> None:
    settings = {"mode": "segment", "boundaries": boundaries}
    missing = ready(device, n_slots=14, **settings)
    assert drawn(missing, 10) == drawn(ready(device, **settings), 10)
    assert missing.experts.io.misses > 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_draw_counts_as_sampling_where_parts_are_timed(device: str) -> None:
    lines: list[str] = []
    made = ready(device, mode="segment", timer=StepTimer(torch.device(device), lines.append))
    assert drawn(made, 6) == drawn(ready(device, mode="segment"), 6)
    assert len(lines) == 5
    assert all(float(line.split("sampling ")[1].split(",")[0]) > 0 for line in lines)


@pytest.mark.parametrize("mode", ["layer", "segment"])
def test_each_way_to_draw_is_recorded_once(mode: str) -> None:
    made = ready(mode=mode)
    made.greedy(3)
    captures, before = made.runner.counters.captures, made.runner.counters.launches
    drawn(made, 10)
    assert made.runner.counters.captures == captures + 2
    plain = ready(mode=mode)
    plain.greedy(3)
    own = plain.runner.counters.launches
    plain.greedy(10)
    n_launches = made.runner.counters.launches - before
    assert n_launches == plain.runner.counters.launches - own + 10


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_drawn_where_no_sampling_is_given(device: str) -> None:
    made = ready(device, mode="segment")
    made.runner.step(7, WISHES[0])
    made.runner._step.buffers.drawn.fill_(-7)
    made.runner.step(8)
    assert made.runner._step.buffers.drawn.tolist() == [-7, -7]
    assert made.runner.likeliest() == int(made.runner.logits().argmax())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sampling", WISHES[:2])
def test_a_nan_is_refused_with_its_place(device: str, sampling: Sampling) -> None:
    made = ready(device, mode="eager")
    buffers, own = made.runner._step.buffers, made.runner._step.head

    def spoiled() -> None:
        own()
        buffers.logits[0, 77] = float("nan")
        buffers.likeliest.copy_(torch.tensor([77, 1]))

    made.runner._step.head = spoiled  # type: ignore[method-assign]
    made.runner.step(7, sampling)
    with pytest.raises(ShardError, match="position 6: the logit of id 77 is NaN"):
        made.runner.drawn()
    made.runner._step.head = own  # type: ignore[method-assign]
    assert len(drawn(made, 2)) == 2
