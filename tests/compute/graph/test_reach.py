"""A sequence that grows beyond what the recorded graphs reach."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from compute.graph.step_buffers import FIRST_REACH
from protocol.files.checkpoint import open_checkpoint
from tests.support.decode_rig import Rig, make_rig
from tests.support.fake_checkpoint import write_fake_checkpoint

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
N_PROMPT, N_NEW = FIRST_REACH - 14, 24
CONTEXT = 2 * FIRST_REACH


def grown(directory: Path, device: str, mode: str) -> tuple[Rig, list[list[np.ndarray]]]:
    """Return a rig behind so many tokens, and the bytes of its state after each of the last."""
    checkpoint = open_checkpoint(directory)
    drawn = random.Random(1)
    tokens = [drawn.randrange(checkpoint.config.vocab_size) for _ in range(N_PROMPT + N_NEW)]
    made = make_rig(device, checkpoint=checkpoint, context=CONTEXT, mode=mode)
    with torch.inference_mode():
        for first in range(0, N_PROMPT, 101):
            made.experts.begin_step()
            chunk = tokens[first : min(first + 101, N_PROMPT)]
            made.model.forward(made.runner.sequence, chunk, made.experts, made.experts)
            made.experts.end_step()
    states = []
    for token in tokens[N_PROMPT:]:
        made.runner.step(token)
        chosen = made.runner.buffers.selections.values()
        states.append(made.state() + [rows.cpu().numpy().copy() for rows in chosen])
    return made, states


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_checkpoint(tmp_path_factory.mktemp("reach") / "model")


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["layer", "segment"])
def test_positions_beyond_the_first_graphs_reach_are_seen(
    device: str, mode: str, directory: Path
) -> None:
    eager, wanted = grown(directory, device, "eager")
    made, found = grown(directory, device, mode)
    for left, right in zip(found, wanted, strict=True):
        assert all(map(np.array_equal, left, right))
    assert made.runner._step.reach == eager.runner._step.reach == 2 * FIRST_REACH
    before = made.runner.counters.captures
    assert before
    made.runner.finish()
    made.runner.sequence.reset()
    made.runner.step(5)  # a new sequence reaches as far as the first did
    assert made.runner._step.reach == FIRST_REACH


@pytest.mark.slow
def test_a_step_that_did_not_reach_would_be_seen(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, wanted = grown(directory, "cpu", "eager")
    monkeypatch.setattr("compute.graph.decode_step.DecodeStep.extend_reach", lambda *_: None)
    _, found = grown(directory, "cpu", "segment")
    same = [all(map(np.array_equal, *pair)) for pair in zip(found, wanted, strict=True)]
    assert same.index(False) == FIRST_REACH - N_PROMPT
