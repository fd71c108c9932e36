"""What must hold in a slot cache between two events. Slow; for tests and for a debug build."""

from __future__ import annotations

from collections import Counter

from .cache_parts import CacheParts, Engine
from .slots import FREE, LOADING, READY, RETIRING


def check_parts(parts: CacheParts) -> None:
    """Raise AssertionError naming the first thing that does not hold."""
    _check_states(parts)
    _check_table(parts)
    _check_readers(parts)
    _check_counts(parts)


def _slots_in(parts: CacheParts, state: int) -> set[int]:
    return {slot for slot, found in enumerate(parts.book.state) if found == state}


def _check_states(parts: CacheParts) -> None:
    """Every slot is in one state, and in the list that belongs to it, once."""
    book = parts.book
    assert book.headers["state"].tolist() == [int(state) for state in book.state], "state mirror"
    assert book.headers["generation"].tolist() == book.generation, "generation mirror"
    usable = {slot for slot in _slots_in(parts, FREE) if slot < book.n_usable}
    assert sorted(book.free) == sorted(usable), "free list"
    for slot, key in enumerate(book.key):
        assert key < 0 or book.fits(slot, book.room_of(key)), "an expert in too small a slot"
    assert parts.flights.slots == _slots_in(parts, LOADING), "reads under way"
    retiring = parts.retired.slots()
    assert sorted(retiring) == sorted(_slots_in(parts, RETIRING)), "retire queue"
    assert set(book.slot_of.values()) == _slots_in(parts, READY), "READY keys"
    assert not (retiring and parts.engine is Engine.NONE), "RETIRING without an engine"


def _check_table(parts: CacheParts) -> None:
    """The table, the headers and the policy name the READY keys, each in one slot."""
    book = parts.book
    named = {int(key): int(book.table.reshape(-1)[key]) for key in _named(parts)}
    assert named == book.slot_of, "the table names the READY keys"
    for key, slot in book.slot_of.items():
        header = book.headers[slot]
        assert divmod(key, book.n_experts) == (header["layer"], header["expert"]), "key in header"
        assert book.key[slot] == key, "key mirror"
    assert not parts.flights.keys & book.slot_of.keys(), "a key READY and being read"
    residents = parts.residents
    assert residents.residents().tolist() == sorted(book.slot_of), "the policy's residents"
    assert residents.expected <= parts.flights.keys, "a guest expected that is not being read"
    assert int(parts.memory.sequence[0]) % 2 == 0, "sequence lock"
    assert int(parts.memory.version[0]) == book.versions.current, "version word"


def _named(parts: CacheParts) -> list[int]:
    flat = parts.book.table.reshape(-1)
    return [key for key in range(flat.size) if flat[key] >= 0]


def _check_readers(parts: CacheParts) -> None:
    """Leases are of READY slots and within the quota; waiting keys are wanted and promised."""
    leases, fetches = parts.leases, parts.fetches
    assert set(leases.pins) <= _slots_in(parts, READY), "a leased slot is not READY"
    assert sum(leases.pins.values()) == leases.n_held, "leases counted"
    assert leases.n_held + leases.n_promised <= leases.highest_quota, "lease quota"
    assert fetches.n_waiting == leases.n_promised, "promised leases"
    for key in fetches.starved:
        assert fetches.wants(key), "a starved key that nobody wants"
        assert key not in parts.book.slot_of, "a starved key that is READY"
        assert parts.flights.load_of(key) is None, "a starved key that is being read"
    for key in fetches.wanted_keys:
        waits = key in fetches.starved or parts.flights.load_of(key) is not None
        assert waits, "a wanted key that nothing will bring"


def _check_counts(parts: CacheParts) -> None:
    """The counters add up."""
    counters = parts.counters
    window = parts.windows.open
    unplaced = 0 if window is None else len(window.unplaced)
    found = Counter(parts.book.state)
    sorted_out = counters.n_hits + counters.n_adopted + counters.n_misses
    sorted_out += counters.n_barred + counters.n_no_slot
    assert counters.n_requested == sorted_out + unplaced, "requested keys"
    returned = counters.n_published + counters.n_failed + counters.n_discarded
    assert counters.n_loads == returned + found[LOADING], "reads begun"
    lost = counters.n_evictions + counters.n_retirements
    assert counters.n_restored + counters.n_published - lost == found[READY], "READY slots"
