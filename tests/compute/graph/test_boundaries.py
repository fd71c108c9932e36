"""Misses at every layer, alone and in pairs, where something else begins at that position too."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest

from compute.graph.segments import KINDS
from protocol.files.checkpoint import Checkpoint, open_checkpoint
from tests.support.decode_rig import Rig, demo, make_rig
from tests.support.fake_checkpoint import write_fake_checkpoint

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A window of 8, 8 rows selected, of 3 candidate blocks of 4: all of it begins early."""
    return open_checkpoint(write_fake_checkpoint(tmp_path_factory.mktemp("small") / "model"))


def both(checkpoint: Checkpoint, device: str, boundaries: str) -> tuple[Rig, Rig]:
    eager = make_rig(device, checkpoint=checkpoint, context=160, mode="eager")
    made = make_rig(
        device, checkpoint=checkpoint, context=160, mode="segment", boundaries=boundaries
    )
    return eager, made


def repeat(eager: Rig, made: Rig, token: int, cases: list[tuple[int, ...]]) -> None:
    """Take a token in; on one side once for each case, with misses at its layers."""
    ids = made.runner.sequence.last_ids
    eager.runner.step(token)
    wanted, picks = eager.state(), eager.runner._headers.all_picks()
    for layers in cases:
        for layer in layers:
            made.daemon.drop(layer, int(picks[layer, (layer + len(layers)) % picks.shape[1]]))
        made.experts.take_changes()
        made.daemon.asked.clear()
        made.runner.step(token)
        assert [asked[0] for asked in made.daemon.asked] == list(layers)
        position = made.runner.sequence.position
        for left, right in zip(made.state(), wanted, strict=True):
            assert np.array_equal(left, right), f"position {position - 1}, misses at {layers}"
        made.runner.sequence.position, made.runner.sequence.last_ids = position - 1, ids
    made.runner.step(token)  # once more, with nothing missing
    for left, right in zip(made.state(), wanted, strict=True):
        assert np.array_equal(left, right)


def walk(
    eager: Rig, made: Rig, n_positions: int, looked_at: set[int], *, share: float = 1.0
) -> None:
    """Random tokens; at some positions with misses at each layer and at each or some pairs."""
    drawn, config = random.Random(1), made.model.config
    pairs = list(combinations(range(config.n_layers), 2))
    for position in range(n_positions):
        token = drawn.randrange(config.vocab_size)
        cases: list[tuple[int, ...]] = []
        if position in looked_at:
            some = drawn.sample(pairs, max(1, round(share * len(pairs))))
            cases = [*((layer,) for layer in range(config.n_layers)), *some]
        repeat(eager, made, token, cases)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "boundaries"),
    [
        ("cpu", "whole"),
        pytest.param("cpu", "auto", marks=pytest.mark.accept),
        pytest.param("cpu", "source-layers", marks=pytest.mark.accept),
        *(pytest.param("cuda", kind, marks=pytest.mark.gpu) for kind in KINDS),
    ],
)
def test_misses_around_the_ends_of_window_selection_and_candidates(
    device: str, boundaries: str, small: Checkpoint
) -> None:
    eager, made = both(small, device, boundaries)
    # The window wraps at 8; more than 8 rows from 9 (ratio 1) and 18 (ratio 2) on; more than
    # 3 blocks from 12 on; groups of two close at odd positions.
    looked_at = {0, 1, 7, 8, 9, 11, 12, 13, 16, 17, 18, 19, 24}
    walk(eager, made, 26, looked_at, share=1.0 if device == "cuda" else 0.2)
    step = made.runner._step
    assert step.buffers.kept is not None
    assert not step.buffers.kept.all(), "no block was ever left out"


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_misses_around_the_end_of_the_demos_window(device: str) -> None:
    window = demo().config.sliding_window
    eager, made = both(demo(), device, "whole")
    for one in (eager, made):
        one.prefill(list(range(20, 20 + window - 3)), at_once=True)
    looked_at = {2, 3, 4}  # the window's last position and the two behind it
    walk(eager, made, 6, looked_at, share=1.0 if device == "cuda" else 0.1)
    assert made.runner.sequence.position == window + 3
