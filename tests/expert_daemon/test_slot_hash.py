from __future__ import annotations

import numpy as np
import pytest

from expert_daemon import slot_hash
from expert_daemon.checksums import slot_checksum


@pytest.mark.parametrize("step", [1, 7, 64, 1000, 1 << 20])
def test_steps_of_any_size_give_the_slots_checksum(monkeypatch, step):
    monkeypatch.setattr(slot_hash, "STEP_BYTES", step)
    memory = np.random.default_rng(1).integers(0, 256, 3000, dtype=np.uint8)
    pieces = [(0, 700), (768, 33), (1024, 0), (1280, 900), (2304, 1)]
    hashing = slot_hash.SlotHash(memory, pieces)
    n_steps = 1
    while not hashing.step():
        n_steps += 1
    assert hashing.checksum == slot_checksum(memory, pieces)
    assert n_steps == -(-1634 // step)


def test_a_slot_without_bytes_is_done_at_once():
    hashing = slot_hash.SlotHash(np.zeros(8, np.uint8), [(0, 0)])
    assert hashing.step()
