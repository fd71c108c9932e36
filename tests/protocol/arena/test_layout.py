from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.arena.layout import (
    HEADER,
    HUGE_BYTES,
    PAGE_BYTES,
    PIECES,
    SECTIONS,
    ArenaLayout,
    ArenaView,
    Identity,
    SlotState,
    read_identity,
    update_identity,
    write_identity,
)
from protocol.errors import ConfigError, ProtocolError


def plan(**changes: object) -> ArenaLayout:
    counts: dict[str, object] = {
        "n_layers": 3,
        "n_experts": 8,
        "n_slots_max": 5,
        "slot_bytes": 8192,
        "row_bytes": 36,
        "ring_rows": 100,
        "piece_offsets": (0, 1024, 2048, 3072, 4096, 5120),
        "piece_bytes": (1000, 64, 1000, 64, 1000, 64),
    }
    counts.update(changes)
    return ArenaLayout.plan(**counts)  # type: ignore[arg-type]


def identity_of(layout: ArenaLayout) -> Identity:
    return Identity(
        layout=layout,
        arena_id=bytes(range(16)),
        fingerprint=b"f" * 16,
        daemon_generation=3,
        n_slots=4,
        engine_pid=77,
        engine_started=1 << 40,
        clean=True,
    )


@given(
    n_layers=st.integers(1, 64),
    n_experts=st.integers(1, 400),
    n_slots_max=st.integers(1, 5000),
    pages=st.integers(1, 5000),
    row_bytes=st.integers(0, 600),
    ring_rows=st.integers(0, 5000),
)
def test_sections_are_in_order_and_never_overlap(
    n_layers: int, n_experts: int, n_slots_max: int, pages: int, row_bytes: int, ring_rows: int
) -> None:
    layout = ArenaLayout.plan(
        n_layers=n_layers,
        n_experts=n_experts,
        n_slots_max=n_slots_max,
        slot_bytes=pages * PAGE_BYTES,
        row_bytes=row_bytes,
        ring_rows=ring_rows,
        piece_offsets=(0,) * 6,
        piece_bytes=(0,) * 6,
    )
    end = 0
    for name in SECTIONS:
        assert layout.offset(name) >= end
        end = layout.offset(name) + layout.size(name)
    assert end <= layout.n_bytes
    assert layout.n_bytes % PAGE_BYTES == 0
    assert layout.slots_offset % PAGE_BYTES == 0
    assert layout.bookkeeping_bytes <= layout.slots_offset
    covered = sum(layout.chunk(chunk)[1] for chunk in range(layout.n_chunks))
    assert covered == layout.size("slots")


@given(n_layers=st.integers(1, 64), n_experts=st.integers(1, 400))
def test_engine_pages_share_no_page_with_the_daemons(n_layers: int, n_experts: int) -> None:
    layout = plan(n_layers=n_layers, n_experts=n_experts)
    begin, n_bytes = layout.engine_pages
    assert begin % PAGE_BYTES == 0
    assert n_bytes % PAGE_BYTES == 0
    assert begin >= layout.size("identity")
    assert begin + n_bytes == layout.offset("table_lock")
    assert layout.offset("tier") + layout.size("tier") <= begin + n_bytes


def test_large_arena_has_chunks_of_whole_slots_and_whole_huge_pages() -> None:
    layout = plan(slot_bytes=18_800_640, n_slots_max=1000, piece_bytes=(0,) * 6)
    assert layout.slots_offset % HUGE_BYTES == 0
    for chunk in range(layout.n_chunks - 1):
        offset, n_bytes = layout.chunk(chunk)
        assert offset % HUGE_BYTES == 0
        assert n_bytes % HUGE_BYTES == 0
        assert n_bytes % layout.slot_bytes == 0


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"n_layers": 0}, "n_layers is 0"),
        ({"n_slots_max": 0}, "n_slots_max is 0"),
        ({"slot_bytes": 5000}, "no multiple"),
        ({"slot_bytes": 1 << 40}, "slot_bytes"),
        ({"ring_rows": -1}, "ring_rows is -1"),
        ({"piece_offsets": (0, 1024)}, "2 piece offsets"),
        ({"piece_offsets": (0, 512, 2048, 3072, 4096, 5120)}, "piece gate_scale at 512"),
        ({"piece_offsets": (0, 1025, 2048, 3072, 4096, 5120)}, "multiple of 256"),
        ({"piece_bytes": (1000, 64, 1000, 64, 1000, 4096)}, "ending by 8192"),
    ],
)
def test_plan_refuses_counts_out_of_range(changes: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        plan(**changes)


def test_identity_page_says_what_was_written() -> None:
    layout = plan()
    memory = bytearray(layout.n_bytes)
    identity = identity_of(layout)
    write_identity(memory, identity)
    assert read_identity(memory) == identity
    changed = update_identity(memory, daemon_generation=4, engine_pid=0, clean=False)
    assert changed == replace(identity, daemon_generation=4, engine_pid=0, clean=False)
    assert read_identity(memory) == changed


def test_identity_page_of_another_layout_names_both_sides() -> None:
    layout = plan()
    memory = bytearray(layout.n_bytes)
    write_identity(memory, replace(identity_of(layout), layout_version=(1, 5)))
    with pytest.raises(ProtocolError, match=r"layout 1\.5, this program has 2\.0"):
        read_identity(memory)


def test_identity_page_with_a_newer_minor_is_read() -> None:
    layout = plan()
    memory = bytearray(layout.n_bytes)
    write_identity(memory, replace(identity_of(layout), layout_version=(2, 7)))
    assert read_identity(memory).layout_version == (2, 7)


def test_page_that_is_no_arena_is_refused() -> None:
    with pytest.raises(ProtocolError, match="wanted an arena"):
        read_identity(bytearray(PAGE_BYTES))
    with pytest.raises(ProtocolError, match="wanted an arena"):
        read_identity(b"HRARENA\n")


@given(place=st.integers(8, 535), bit=st.integers(0, 7))
def test_one_wrong_bit_in_the_fixed_part_is_found(place: int, bit: int) -> None:
    layout = plan()
    memory = bytearray(layout.n_bytes)
    write_identity(memory, identity_of(layout))
    memory[place] ^= 1 << bit
    if 12 <= place < 16:
        place = 0  # the minor version is covered by the checksum too
    with pytest.raises(ProtocolError):
        read_identity(memory)


def test_more_slots_in_use_than_there_are_is_refused() -> None:
    layout = plan()
    memory = bytearray(layout.n_bytes)
    write_identity(memory, identity_of(layout))
    struct.pack_into("<Q", memory, 1032, layout.n_slots_max + 1)
    with pytest.raises(ProtocolError, match="6 slots in use, the arena has room for 5"):
        read_identity(memory)


def test_views_are_disjoint_and_cover_their_sections() -> None:
    layout = plan()
    memory = bytearray(layout.n_bytes)
    view = ArenaView(memory, layout)
    arrays = [
        view.identity,
        view.epochs,
        view.tier,
        view.table_sequence,
        view.table_version,
        view.table,
        view.headers,
        view.policy,
        view.verified,
        view.counters,
        view.ring,
    ]
    for number, array in enumerate(arrays, 1):
        array.view(np.uint8)[...] = number
    for number, array in enumerate(arrays, 1):
        assert (array.view(np.uint8) == number).all()
    for slot in range(layout.n_slots_max):
        view.slot(slot)[:] = bytes([100 + slot]) * layout.slot_bytes
    assert all(view.piece(slot, "down")[0] == 100 + slot for slot in range(layout.n_slots_max))
    assert (view.ring == 11).all()


def test_pieces_stand_where_the_layout_says() -> None:
    layout = plan()
    memory = bytearray(layout.n_bytes)
    view = ArenaView(memory, layout)
    for number, name in enumerate(PIECES):
        view.piece(2, name)[:] = bytes([number + 1]) * layout.piece_bytes[number]
    slot = bytes(view.slot(2))
    for number in range(len(PIECES)):
        begin = layout.piece_offsets[number]
        assert set(slot[begin : begin + layout.piece_bytes[number]]) == {number + 1}
    assert not any(view.slot(1)) and not any(view.slot(3))
    with pytest.raises(IndexError, match="slot 5: the arena has 5"):
        view.slot(5)
    with pytest.raises(IndexError):
        view.slot(-1)


def test_read_only_memory_gives_read_only_views_but_for_the_engines_pages() -> None:
    layout = plan()
    memory = bytearray(layout.n_bytes)
    begin, n_bytes = layout.engine_pages
    pages = memoryview(memory)[begin : begin + n_bytes]
    view = ArenaView(memoryview(memory).toreadonly(), layout, pages)
    assert view.slot(0).readonly
    assert not view.table.flags.writeable
    assert not view.headers.flags.writeable
    view.tier[1, 2] = 2
    view.epochs[1] = 9
    assert ArenaView(memory, layout).tier[1, 2] == 2
    with pytest.raises(ConfigError, match="engine pages of 4096 bytes"):
        ArenaView(memory, layout, bytearray(4096))


def test_view_of_too_little_memory_is_refused() -> None:
    layout = plan()
    with pytest.raises(ConfigError, match="bytes are mapped"):
        ArenaView(bytearray(layout.n_bytes - 1), layout)


def test_table_is_not_seen_while_it_is_written() -> None:
    layout = plan()
    view = ArenaView(bytearray(layout.n_bytes), layout)
    with view.table_write() as table:
        table[0, 0] = 3
        assert view.table_snapshot(tries=5) is None
    snapshot = view.table_snapshot()
    assert snapshot is not None and snapshot[0, 0] == 3
    with pytest.raises(ZeroDivisionError), view.table_write():
        raise ZeroDivisionError
    assert view.table_snapshot(tries=5) is None
    with view.table_write():
        pass
    assert view.table_snapshot() is not None


def test_slot_header_is_64_bytes() -> None:
    assert HEADER.itemsize == 64
    assert HEADER.fields is not None and HEADER.fields["score"][1] == 32
    assert [state.name for state in SlotState] == ["FREE", "LOADING", "READY", "RETIRING"]


def test_model_without_engram_has_an_empty_ring() -> None:
    layout = plan(row_bytes=0, ring_rows=0)
    assert ArenaView(bytearray(layout.n_bytes), layout).ring.shape == (0, 0)
