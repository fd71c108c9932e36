"""Pieces of models with Engrams in other places: every layer once, the bytes of the eager run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol.files.checkpoint import open_checkpoint
from tests.support.decode_rig import Rig, make_rig
from tests.support.fake_checkpoint import write_fake_checkpoint

PROMPT = [3, 11, 17, 2, 9]
WHOLE = {"mode": "segment", "boundaries": "whole"}
WAYS: list[dict[str, Any]] = [
    WHOLE | {"checks": True, "lookahead": 2},
    {"mode": "oracle", "boundaries": "source-layers", "checks": True},
    {"mode": "segment", "boundaries": "auto"},
]


def rows_are_late(made: Rig) -> None:
    take = made.daemon.take_rows

    def late(handle: int) -> Any:
        time.sleep(0.002)
        return take(handle)

    made.daemon.take_rows = late  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("n_layers", "engrams"),
    [(8, []), (8, [0]), (8, [7]), (8, [0, 7]), (8, [0, 2, 3, 5, 7]), (1, []), (1, [0]), (2, [1])],
)
def test_pieces_take_every_layer_once_and_misses_beside_late_rows_change_no_byte(
    n_layers: int, engrams: list[int], tmp_path: Path
) -> None:
    text = {"engram_layer_ids": engrams}
    checkpoint = open_checkpoint(
        write_fake_checkpoint(tmp_path / "m", n_layers=n_layers, text_config=text)
    )
    eager = make_rig(checkpoint=checkpoint, mode="eager")
    eager.prefill(PROMPT)
    wanted = eager.greedy(4)
    for settings in WAYS:
        made = make_rig(checkpoint=checkpoint, n_device=3, **settings)
        made.prefill(PROMPT)
        made.runner.assume_misses(max(1, n_layers // 2))
        rows_are_late(made)
        launched: list[int] = []
        layers = made.runner._launches.layers

        def noted(first: int, end: int, launched: Any = launched, layers: Any = layers) -> None:
            launched += range(first, end)
            layers(first, end)

        made.runner._launches.layers = noted  # type: ignore[method-assign]
        token, ids = 42, []
        for number in range(4):
            for layer in (0, n_layers - 1):
                for expert in range(checkpoint.config.n_experts):
                    made.daemon.drop(layer, expert)
            launched.clear()
            made.runner.step(token)
            assert launched == list(range(n_layers))
            token = made.runner.likeliest()
            ids.append(token)
            made.runner.expect((token + number % 2) % 64)  # not always the one that comes
        made.runner.finish()
        assert ids == wanted
        assert made.experts.io.misses
        assert all(map(np.array_equal, made.state(), eager.state()))
