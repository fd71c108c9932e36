"""Slots of several sizes: where they stand, that they overlap nowhere, that any prefix is fair."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.arena.identity import Identity, read_identity, write_identity
from protocol.arena.layout import ArenaLayout, ArenaView, Rooms
from protocol.arena.rooms import MOST_ROOMS
from protocol.errors import ConfigError

MIB = 1 << 20
SIZES = st.lists(st.integers(1, 5000).map(lambda pages: pages * 4096), min_size=1, max_size=60)


@given(sizes=SIZES, n_common=st.integers(0, 200), n_slots=st.integers(0, 400))
def test_slots_stand_one_behind_the_other(sizes: list[int], n_common: int, n_slots: int) -> None:
    rooms = Rooms.of(sizes, n_common)
    assert rooms.sizes[0] == max(sizes)
    assert sum(rooms.n_layers) == len(sizes)
    assert len(rooms.sizes) <= MOST_ROOMS
    assert rooms.n_common >= n_common or rooms.is_uniform
    for slot in range(n_slots):
        assert rooms.end(slot) + rooms.size(slot) <= rooms.end(slot + 1)
        assert rooms.end(slot) % 4096 == 0
        assert rooms.size(slot) == rooms.sizes[rooms.room(slot)]
        assert slot >= rooms.n_common or rooms.room(slot) == 0
    assert rooms.n_for_any(n_slots) == [rooms.room(s) for s in range(n_slots)].count(0)


@given(sizes=SIZES)
def test_every_expert_fits_its_room(sizes: list[int]) -> None:
    rooms = Rooms.of(sizes, 46)
    for size in sizes:
        room = rooms.room_for(size)
        assert rooms.sizes[room] >= size
        assert room + 1 == len(rooms.sizes) or rooms.sizes[room + 1] < size
    needed = Counter(rooms.room_for(size) for size in sizes)
    assert tuple(needed[room] for room in range(len(rooms.sizes))) == rooms.n_layers


@given(sizes=st.lists(st.sampled_from([20 * MIB, 16 * MIB, 12 * MIB]), min_size=2, max_size=40))
def test_any_prefix_behind_the_common_slots_is_shared_fairly(sizes: list[int]) -> None:
    rooms = Rooms.of(sizes, 0)
    given_out = Counter[int]()
    for slot in range(3 * len(rooms.block)):
        given_out[rooms.room(slot)] += 1
        for room, count in enumerate(rooms.n_layers):
            assert abs(given_out[room] - (slot + 1) * count / len(sizes)) < len(rooms.sizes)
    assert {given_out[room] / count for room, count in enumerate(rooms.n_layers)} == {
        3 * len(rooms.block) / len(sizes)
    }


def test_a_block_is_whole_huge_pages_and_a_chunk_whole_blocks() -> None:
    rooms = Rooms.of([20 * MIB] * 8 + [12 * MIB + 4096] * 32, 158)
    assert len(rooms.block) == 20
    assert rooms.n_common == 160
    assert rooms.chunk_slots == 20
    for block in range(20):
        assert rooms.end(20 * block) % (2 * MIB) == 0
    spent = rooms.end(1160) - rooms.end(160)
    assert 1 <= spent / (1000 * (0.2 * 20 * MIB + 0.8 * (12 * MIB + 4096))) < 1.008


def test_one_size_stands_as_it_always_did() -> None:
    rooms = Rooms.of([18_800_640] * 40, 158)
    assert rooms.is_uniform
    assert rooms.n_common == 0
    assert rooms.end(5) == 5 * 18_800_640
    assert rooms.chunk_slots == 256


def planned(n_slots: int = 100) -> ArenaLayout:
    return ArenaLayout.plan(
        n_layers=3, n_experts=4, n_slots_max=n_slots, slot_bytes=12_288, row_bytes=84, ring_rows=16,
        piece_offsets=(0, 4096, 4096, 8192, 8192, 12_288), piece_bytes=(4096, 0, 4096, 0, 4096, 0),
        rooms=Rooms.of([12_288, 4096, 4096], 20),
    )  # fmt: skip


def test_an_identity_page_keeps_the_rooms() -> None:
    layout = planned()
    memory = bytearray(layout.n_bytes)
    write_identity(memory, Identity(layout, b"a" * 16, b"f" * 16, 1, 100))
    assert read_identity(memory).layout == layout
    assert layout.populated_bytes(100) == layout.slots_offset + layout.rooms.end(100)


def test_a_slots_pieces_are_those_of_the_layer_in_its_header() -> None:
    layout = planned()
    view = ArenaView(bytearray(layout.n_bytes), layout)
    view.pieces[1] = [[0, 1024, 1024, 2048, 2048, 3072], [1000, 0, 1000, 0, 1000, 0]]
    small = next(slot for slot in range(100) if layout.rooms.room(slot) == 1)
    for slot, layer, n_bytes in ((0, 0, 4096), (0, 1, 1000), (small, 1, 1000)):
        view.headers["layer"][slot] = layer
        view.slot(slot)[:] = bytes(layout.rooms.size(slot))
        view.piece(slot, "down")[:] = b"\7" * n_bytes
        assert bytes(view.slot(slot)).count(7) == n_bytes
    assert len(view.slot(small)) == 4096


@pytest.mark.parametrize(
    "rooms",
    [
        Rooms((12_288, 12_288), (1, 1), 0),
        Rooms((4096, 12_288), (1, 1), 0),
        Rooms((8192,), (1,), 0),
        Rooms((12_288, 5000), (1, 1), 0),
        Rooms((12_288, 4096), (1, 0), 0),
        Rooms((12_288, 4096), (1, 1), 3),
        Rooms((12_288, 4096), (1,), 0),
    ],
)
def test_rooms_that_cannot_be_are_refused(rooms: Rooms) -> None:
    with pytest.raises(ConfigError, match="arena layout: slots of"):
        ArenaLayout.plan(
            n_layers=3, n_experts=4, n_slots_max=9, slot_bytes=12_288, row_bytes=0, ring_rows=0,
            piece_offsets=(0,) * 6, piece_bytes=(0,) * 6, rooms=rooms,
        )  # fmt: skip
