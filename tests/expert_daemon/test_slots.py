"""A daemon that is killed between any two stores leaves headers that its successor can trust."""

from __future__ import annotations

import pytest

from protocol.arena.layout import SlotState
from tests.support.caches import Rig


class Killed(Exception):
    """The process ends at this store."""


class Fuse:
    """Counts the stores of a slot book and kills at one of them."""

    def __init__(self, rig, stores_left):
        self.left = stores_left
        book = rig.cache._book
        for name, column in book._column.items():
            book._column[name] = FusedArray(column, self)
        for name in ("table", "_sequence", "_version_word"):
            setattr(book, name, FusedArray(getattr(book, name), self))


class FusedArray:
    def __init__(self, array, fuse):
        self.array = array
        self.fuse = fuse

    def __getitem__(self, index):
        return self.array[index]

    def __setitem__(self, index, value):
        if self.fuse.left == 0:
            raise Killed
        self.fuse.left -= 1
        self.array[index] = value

    def reshape(self, *shape):
        return self.array.reshape(*shape)

    @property
    def shape(self):
        return self.array.shape


def evict_and_load(rig, content):
    """Evict a READY slot for a miss, fail one read, publish the other; bytes follow the loads."""
    loads = rig.ask(1, [4, 5])
    for load in loads:
        content[load.slot] = "part"
    rig.cache.fail(loads[0], "EIO", "injected")
    content[loads[1].slot] = (1, loads[1].expert)
    rig.cache.finish(loads[1], checksum=7)
    rig.answer()
    rig.cache.ack(rig.cache.table_version, 0)


def test_kill_at_any_store_leaves_no_ready_slot_with_other_bytes():
    n_stores = 0
    while True:
        rig = Rig(4, free_pool=1)
        slots = rig.get(0, [0, 1, 2, 3]).slots
        content: dict[int, object] = {slot: (0, expert) for expert, slot in enumerate(slots)}
        Fuse(rig, n_stores)
        try:
            evict_and_load(rig, content)
        except Killed:
            n_stores += 1
            cache = rig.restart()
            for layer, expert, slot in cache.resident():
                assert content[slot] == (layer, expert)
            whole = [s for s in content if content[s] != "part" and s in slots[2:]]
            assert set(whole) <= {slot for _, _, slot in cache.resident()}
            continue
        break
    assert n_stores > 30, "the fuse must have been in the way"


def test_a_key_may_not_be_ready_twice():
    rig = Rig()
    (load,) = rig.ask(0, [0])
    rig.cache.finish(load)
    book = rig.cache._book
    slot = book.free[-1]
    book.to_loading(slot, 0)
    with pytest.raises(AssertionError, match="READY in slot"):
        book.to_ready(slot, 0, 0.0, 0)


@pytest.mark.parametrize("edge", ["to_ready", "to_retiring", "to_free"])
def test_an_edge_that_is_not_legal_is_our_own_bug(edge):
    rig = Rig()
    book = rig.cache._book
    assert book.state[0] == SlotState.FREE
    arguments = {"to_ready": (0, 0, 0.0, 0), "to_retiring": (0,), "to_free": (0,)}[edge]
    with pytest.raises(AssertionError):
        getattr(book, edge)(*arguments)


def test_a_loading_slot_is_not_loaded_again():
    rig = Rig()
    (load,) = rig.ask(0, [0])
    with pytest.raises(AssertionError, match="not FREE"):
        rig.cache._book.to_loading(load.slot, 9)
