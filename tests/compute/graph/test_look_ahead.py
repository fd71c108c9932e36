"""Routers of later layers on a layer's input: guesses, hints, and the file of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from compute.graph.guess_writer import GuessWriter
from kernels.reference.route_select import route_select
from kernels.reference.router_logits import router_logits
from protocol.files.guess_format import NO_EXPERT, GuessShape, decode_blocks, decode_header
from tests.support.decode_rig import Rig, demo, make_rig, wanted
from tests.support.in_turn import in_turn

PROMPT = [3, 911, 17, 2045]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CONFIG = demo().config
SHAPE = GuessShape(CONFIG.n_layers, CONFIG.n_experts, CONFIG.top_k)


def greedy(made: Rig, n: int, token: int = 42) -> list[int]:
    made.prefill(PROMPT)
    ids = made.greedy(n, token)
    made.runner.finish()
    return ids


@pytest.mark.parametrize("device", DEVICES)
@in_turn(mode=["eager", "layer", "segment", "oracle"], sizes=[(3, 60), (8, 256)])
def test_no_byte_of_a_step_depends_on_it(
    device: str, mode: str, sizes: tuple[int, int], tmp_path: Path
) -> None:
    lookahead, n_slots = sizes
    plain = wanted(device, (*PROMPT,), 5)
    made = make_rig(
        device,
        mode=mode,
        n_slots=n_slots,
        n_device=10,
        lookahead=lookahead,
        guesses=GuessWriter(tmp_path / "guesses", SHAPE),
        checks=True,
    )
    assert greedy(made, 5) == plain.ids
    assert all(map(np.array_equal, made.state(), plain.state))


@pytest.mark.parametrize("device", DEVICES)
def test_a_guess_is_the_later_routers_pick_of_this_layers_input(device: str) -> None:
    made = make_rig(device, mode="eager", lookahead=2)
    inputs: dict[int, torch.Tensor] = {}
    ahead = made.runner._step.ahead
    assert ahead is not None
    launch = ahead.launch

    def noted(layer: int) -> None:
        inputs[layer] = made.runner._step.buffers.row.clone()
        launch(layer)

    ahead.launch = noted  # type: ignore[method-assign]
    greedy(made, 1)
    assert len(inputs) == CONFIG.n_layers
    guesses = ahead.all_guesses()
    for layer in range(CONFIG.n_layers):
        for distance in (1, 2):
            if layer < distance:
                assert (guesses[layer, distance - 1] == -1).all()
                continue
            moe = made.model.blocks[layer].weights.moe
            logits = router_logits(inputs[layer - distance].cpu(), moe.router.cpu())
            ranked, weights = route_select(
                logits, moe.bias.cpu(), CONFIG.top_k, CONFIG.routed_scale
            )
            picks = ranked[0].sort().values.tolist()
            assert guesses[layer, distance - 1].tolist() == picks
            by_weight = ahead.guessed(layer - distance, distance)
            assert by_weight[0] == int(ranked[0][weights[0].argmax()])
            assert sorted(by_weight) == picks


def test_absent_guesses_behind_a_segment_are_hinted_once_a_token() -> None:
    made = make_rig(mode="layer", n_slots=60, lookahead=3)
    made.prefill(PROMPT)
    daemon = made.daemon
    daemon.hinted.clear()
    made.runner.step(7)
    assert daemon.hinted
    assert len({step for step, _, _ in daemon.hinted}) == 1
    keys = [(layer, expert) for _, layer, experts in daemon.hinted for expert in experts]
    assert len(keys) == len(set(keys)) == made.runner.counters.hints
    assert all(layer > 0 for layer, _ in keys)
    # A hint comes before the miss of its layer.
    assert "hint" in daemon.events
    assert daemon.events.index("hint") < len(daemon.events) - daemon.events[::-1].index("miss")


def test_what_is_there_is_not_hinted_and_nothing_is_without_lookahead() -> None:
    full = make_rig(mode="layer", lookahead=3)
    greedy(full, 2)
    assert full.daemon.hinted == []
    without = make_rig(mode="layer", n_slots=60)
    greedy(without, 2)
    assert without.daemon.hinted == []
    assert without.runner._step.ahead is None
    assert without.runner.counters.hints == 0


def test_within_a_segment_no_layer_is_hinted() -> None:
    made = make_rig(mode="segment", boundaries="whole", n_slots=60, lookahead=3)
    greedy(made, 2)
    assert made.runner.counters.hints == 0


def test_the_file_has_each_tokens_picks_and_guesses(tmp_path: Path) -> None:
    path = tmp_path / "guesses"
    made = make_rig(mode="segment", n_slots=60, guesses=GuessWriter(path, SHAPE))
    picks = []
    made.prefill(PROMPT)
    for token in (7, 8, 9):
        made.runner.step(token)
        picks.append(made.runner._headers.all_picks())
    made.runner.finish()
    assert made.runner.counters.hints == 0
    data = path.read_bytes()
    assert decode_header(data, "x") == SHAPE
    found = decode_blocks(data, SHAPE)
    assert found.records["position"].tolist() == [4, 5, 6]
    assert np.array_equal(found.records["picks"], np.array(picks))
    assert (found.records["guesses"][:, 2, 2] == NO_EXPERT).all()
    assert (found.records["guesses"][:, 3, 2] < CONFIG.n_experts).all()
