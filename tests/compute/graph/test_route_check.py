"""The device's routing held to the host's, layer by layer."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from protocol.errors import ShardError
from tests.support.decode_rig import Rig, make_rig, wanted
from tests.support.in_turn import in_turn

PROMPT = [3, 911, 17, 2045]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
N_LAYERS = 8


def greedy(made: Rig, n: int, token: int = 42) -> list[int]:
    made.prefill(PROMPT)
    return made.greedy(n, token)


@pytest.mark.parametrize("device", DEVICES)
@in_turn(mode=["eager", "layer", "segment", "oracle"], tiers=[(256, 0), (60, 20)])
def test_every_layer_is_compared_and_no_byte_changes(
    device: str, mode: str, tiers: tuple[int, int]
) -> None:
    n_slots, n_device = tiers
    plain = wanted(device, (*PROMPT,), 6)
    made = make_rig(device, mode=mode, n_slots=n_slots, n_device=n_device, checks=True)
    assert greedy(made, 6) == plain.ids
    assert all(map(np.array_equal, made.state(), plain.state))
    checked = made.runner.counters.routes_checked
    assert checked >= 6 * N_LAYERS * (2 if mode == "oracle" else 1)
    if made.runner.counters.misses == 0 and mode != "oracle":
        assert checked == 6 * N_LAYERS


def test_no_route_is_compared_where_nobody_asked_for_it() -> None:
    plain = make_rig(mode="eager")
    greedy(plain, 1)
    assert plain.runner.counters.routes_checked == 0


def test_what_was_compared_is_said_at_the_end() -> None:
    lines: list[str] = []
    made = make_rig(mode="segment", checks=True, log=lines.append)
    greedy(made, 2)
    made.runner.finish()
    assert lines[-1].endswith(f", {2 * N_LAYERS} routes checked")
    assert made.runner.counters.values()["routes_checked"] == 2 * N_LAYERS


def _swapped(made: Rig) -> None:
    made.runner._step.buffers.headers[5, 1] ^= 1


def _weighed(made: Rig) -> None:
    made.runner._step.buffers.headers[5, 7] += 1


def _in_plan(made: Rig) -> None:
    kept = made.runner._step.buffers.routes
    assert kept is not None
    kept.weights[5, 2] *= 1.5


def _moved(made: Rig) -> None:
    made.runner._step.buffers.headers[5, 13] += 1


def _pointed(made: Rig) -> None:
    kept = made.runner._step.buffers.routes
    assert kept is not None
    kept.pointers[5, 1, 3] += 256


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_swapped, r"pick 0 of the plan is \d+, wanted \d+"),
        (_weighed, r"weight bits 0 of the plan is 0x\w+, wanted 0x\w+"),
        (_in_plan, r"plan weight 2 is [\d.e-]+, wanted [\d.e-]+"),
        (_moved, r"slot 0 of the plan is \d+, wanted \d+"),
        (_pointed, r"up pointer 3 of the plan is 0x\w+, wanted 0x\w+"),
    ],
)
def test_a_difference_ends_the_step_with_its_layer(
    device: str, spoil: Callable[[Rig], None], said: str
) -> None:
    made = make_rig(device, mode="eager", checks=True)
    greedy(made, 1)
    run = made.runner._step._experts.run

    def spoiled(layer: int, out: torch.Tensor) -> None:
        run(layer, out)
        if layer == 5:
            if device == "cuda":  # the kernel writes headers into the host's memory
                torch.cuda.synchronize()
            spoil(made)

    made.runner._step._experts.run = spoiled  # type: ignore[method-assign]
    before = made.runner.counters.routes_checked
    with pytest.raises(ShardError) as raised:
        made.runner.step(7)
    assert re.fullmatch(
        rf"position 5: the device routes otherwise than the host: layer 5: {said}",
        str(raised.value),
    )
    assert made.runner.counters.routes_checked - before == 5


def test_a_table_that_the_device_lost_track_of_is_found() -> None:
    made = make_rig(mode="segment", checks=True)
    greedy(made, 1)
    table = made.experts.places.table[3]
    table.copy_(table.roll(1))
    with pytest.raises(ShardError, match=r"layer 3: slot 0 of the plan"):
        made.runner.step(7)
