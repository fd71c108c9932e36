"""Facts about slots that are hashed again."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from expert_daemon.checksums import slot_checksum
from expert_daemon.log import flush
from expert_daemon.metrics import Counters
from expert_daemon.rehash import Rehash
from expert_daemon.suspects import Suspects
from expert_daemon.verified import Verified
from protocol.arena.layout import SlotState
from tests.support.caches import Rig

PIECES = ((0, 100), (256, 60), (512, 0))


class World:
    """A cache whose slots have bytes, and suspects."""

    def __init__(self):
        self.rig = Rig(n_slots=8)
        self.slots = np.random.default_rng(1).integers(0, 256, (8, 1024), dtype=np.uint8)
        self.woken = threading.Semaphore(0)
        self.bits = np.zeros(4, np.uint8)
        self.counters = Counters()
        self.new_daemon()
        for load in self.rig.ask(1, range(5)):
            self.rig.cache.finish(load, slot_checksum(self.slots[load.slot], PIECES))
            self.suspects.was_read(load)
        self.rig.answer()

    def new_daemon(self):
        headers = self.rig.memory.headers
        self.rehash = Rehash(headers, self.slots.__getitem__, [PIECES] * 2, self.woken.release)
        self.verified = Verified(self.bits)
        self.suspects = Suspects(self.rig.cache, self.rehash, self.verified, self.counters)

    def settle(self, n):
        for _ in range(n):
            assert self.woken.acquire(timeout=5)
        self.suspects.take_findings()
        self.suspects.give_up_damaged()

    def slot(self, expert):
        return int(self.rig.memory.table[1, expert])


@pytest.fixture
def world():
    made = World()
    yield made
    made.suspects.close()


def test_what_the_daemon_read_is_verified_and_not_hashed_again(world):
    assert all(16 + expert in world.verified for expert in range(5))
    assert 16 + 5 not in world.verified
    world.suspects.begin(all_slots=False)
    assert world.suspects.n_waiting == 0


def test_after_a_death_every_slot_is_hashed_and_good_ones_stay(world, capfd):
    world.suspects.engine_died()
    world.settle(5)
    assert world.counters.rehashed == 5
    assert world.counters.hash_mismatches == 0
    assert all(16 + expert in world.verified for expert in range(5))
    assert len(world.rig.resident()) == 5
    flush()
    assert "hashing 5 experts again" in capfd.readouterr().err


def test_a_damaged_slot_leaves_the_table_and_is_read_again(world, capfd):
    slot = world.slot(3)
    world.slots[slot, 270] ^= 1
    world.suspects.engine_died()
    world.settle(5)
    assert world.counters.hash_mismatches == 1
    assert world.slot(3) == -1
    assert world.rig.memory.headers["state"][slot] == SlotState.RETIRING
    flush()
    assert "layer 1 expert 3" in capfd.readouterr().err
    world.rig.applied = world.rig.cache.table_version
    (load,) = world.rig.ask(1, [3])
    assert load.expert == 3
    world.rig.cache.check()


def test_bytes_between_the_pieces_do_not_count(world):
    world.slots[:, 101:256] ^= 0xFF
    world.suspects.engine_died()
    world.settle(5)
    assert world.counters.hash_mismatches == 0


def test_a_damaged_slot_is_kept_while_a_lease_or_a_window_does(world):
    world.slots[world.slot(2), 0] ^= 1
    world.rig.cache.fetch(1, 1, [(1, 2)])
    world.rig.cache.drain()
    world.suspects.engine_died()
    world.settle(5)
    assert world.slot(2) >= 0
    world.rig.cache.client_gone(1)
    (load,) = world.rig.ask(0, [9])
    world.suspects.give_up_damaged()
    assert world.slot(2) >= 0
    world.rig.cache.finish(load)
    world.rig.answer()
    world.suspects.give_up_damaged()
    assert world.slot(2) == -1
    world.rig.cache.check()


def test_a_slot_that_has_another_key_by_now_is_left_alone(world):
    world.slots[world.slot(2), 0] ^= 1
    world.suspects.engine_died()
    for _ in range(5):
        assert world.woken.acquire(timeout=5)
    for first in (0, 8):  # eight other keys take every slot
        world.rig.get(0, range(first, first + 8))
    world.suspects.take_findings()
    world.suspects.give_up_damaged()
    assert world.counters.hash_mismatches == 0
    assert len(world.rig.resident()) == 8


def test_a_successor_goes_on_where_the_hashing_stopped(world):
    world.verified.clear()
    world.verified.add(16 + 1)
    world.new_daemon()
    world.suspects.begin(all_slots=False)
    world.settle(4)
    assert world.counters.rehashed == 4


def test_what_was_found_before_a_second_death_is_void(world):
    world.suspects.engine_died()
    for _ in range(5):
        assert world.woken.acquire(timeout=5)
    world.slots[world.slot(0), 0] ^= 1  # by the second engine
    world.suspects.engine_died()
    world.settle(5)
    assert world.counters.rehashed == 5
    assert world.counters.hash_mismatches == 1


def test_it_may_begin_again_as_it_ends(world):
    for _ in range(50):
        world.suspects.begin(all_slots=True)
        time.sleep(0.0002)
    end = time.monotonic() + 5
    while not all(16 + expert in world.verified for expert in range(5)):
        assert time.monotonic() < end
        world.suspects.take_findings()
