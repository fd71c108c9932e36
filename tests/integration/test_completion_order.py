"""The order in which reads end changes no bit of the logits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from compute.commands.opening import Opened, opened
from compute.commands.terminal import Display
from compute.config import ComputeConfig
from tests.support.faulty_source import Faults
from tests.support.generation import PROMPT
from tests.support.running_daemon import daemon_thread

SMALL_ARENA = 2_000_000  # a quarter of the demo's experts: most picks are read


def _logits(ready: Opened) -> tuple[bytes, int]:
    """The bytes of a prompt's logits and of two steps after it; experts read for them."""
    misses = ready.engine.source.io.misses
    sequence = ready.engine.new_sequence()
    found = [ready.engine.logits(sequence, PROMPT, every=True)]
    for _ in range(2):
        found.append(ready.engine.logits(sequence, [int(found[-1].reshape(-1).argmax()) % 1000]))
    return b"".join(part.tobytes() for part in found), ready.engine.source.io.misses - misses


@pytest.mark.parametrize("n_shuffles", [6, pytest.param(50, marks=pytest.mark.accept)])
def test_logits_are_bit_equal_however_the_reads_are_shuffled(
    runtime_dir: Path, n_shuffles: int
) -> None:
    faults = Faults()
    config = ComputeConfig(runtime_dir=runtime_dir)
    with (
        daemon_thread("demo", runtime_dir, faults, arena_bytes=SMALL_ARENA) as daemon,
        opened(config, Display(quiet=True)) as ready,
    ):
        wanted, _ = _logits(ready)
        n_reads = 0
        for seed in range(n_shuffles):
            faults.shuffle = random.Random(seed)
            found, n_misses = _logits(ready)
            assert found == wanted, f"shuffle {seed}"
            n_reads += n_misses
        assert n_reads > 20 * n_shuffles
        daemon.daemon.cache.check()
