"""Messages, good frames and bad frames for tests: hypothesis strategies and a plain generator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
from hypothesis import strategies as st

from protocol.wire import messages as m
from protocol.wire.codec import Bounds, encode
from protocol.wire.records import KEY_RECORD, PICK
from protocol.wire.schema import KINDS

N_LAYERS, N_EXPERTS, N_SLOTS, RING_ROWS = 5, 12, 20, 64
BOUNDS = Bounds(N_LAYERS, N_EXPERTS, N_SLOTS, 2, RING_ROWS)

number = st.integers(1, 2**63 - 1)
counter = st.integers(0, 2**63 - 1)
small = st.integers(0, 2**31 - 1)
text = st.text(max_size=40)
layer = st.integers(0, N_LAYERS - 1)
expert = st.integers(0, N_EXPERTS - 1)
slot = st.integers(0, N_SLOTS - 1)
key = st.tuples(layer, expert)
key_set = st.sets(key, max_size=10)
code = st.sampled_from(m.ERROR_CODES)
id16 = st.binary(min_size=16, max_size=16)
maybe16 = st.one_of(st.just(b""), id16)
version = st.tuples(st.integers(0, 65535), st.integers(0, 65535))
finite = st.floats(allow_nan=False, allow_infinity=False)
values = st.dictionaries(st.text(max_size=20), st.one_of(st.integers(-99, 99), finite, text))
ids = st.lists(small, max_size=30).map(tuple)
keys = st.lists(key, min_size=1, max_size=10, unique=True).map(tuple)
experts = st.sets(expert, min_size=1).map(lambda found: tuple(sorted(found)))
slots = st.sets(slot).map(lambda found: tuple(sorted(found)))
chunks = st.sets(slot, min_size=1).map(lambda found: tuple(sorted(found)))
ranked = st.lists(expert, min_size=1, unique=True).map(tuple)


def _faults(found: set[tuple[int, int]]) -> st.SearchStrategy[tuple[Any, ...]]:
    rows = [st.tuples(st.just(la), st.just(ex), code, text) for la, ex in sorted(found)]
    return st.tuples(*rows)


faults = key_set.flatmap(_faults)


@st.composite
def change_lists(draw: st.DrawFn) -> tuple[tuple[int, int, int], ...]:
    found = sorted(draw(key_set))
    places = draw(st.lists(slot, min_size=len(found), max_size=len(found), unique=True))
    absent = draw(st.lists(st.booleans(), min_size=len(found), max_size=len(found)))
    return tuple(
        (la, ex, -1 if gone else place)
        for (la, ex), place, gone in zip(found, places, absent, strict=True)
    )


@st.composite
def versions(draw: st.DrawFn) -> tuple[int, int]:
    low, high = sorted((draw(counter), draw(counter)))
    return low, high


@st.composite
def welcomes(draw: st.DrawFn) -> m.Welcome:
    n_layers, n_experts, n_slots = draw(layer) + 1, draw(expert) + 1, draw(slot) + 1
    order = draw(st.permutations(range(max(n_slots, n_layers * n_experts))))
    table = [place if place < n_slots else -1 for place in order][: n_layers * n_experts]
    return m.Welcome(
        session=draw(number),
        generation=draw(counter),
        arena_id=draw(id16),
        arena_bytes=draw(counter),
        n_layers=n_layers,
        n_experts=n_experts,
        n_slots=n_slots,
        slot_bytes=draw(counter),
        max_experts=draw(counter),
        lease_quota=draw(counter),
        descriptor_address=draw(text),
        version=draw(counter),
        table=np.array(table, "<i4").tobytes(),
        scores=np.array([draw(st.floats(0, 99))] * n_slots, "<f4").tobytes(),
    )


@st.composite
def slot_changes(draw: st.DrawFn) -> m.SlotChanges:
    low, high = draw(versions())
    places = draw(st.lists(slot, max_size=N_EXPERTS, unique=True))
    gone = [draw(st.booleans()) for _ in places]
    return m.SlotChanges(
        request=draw(number),
        from_version=low,
        to_version=high,
        slots=tuple(-1 if g else p for p, g in zip(places, gone, strict=True)),
        changes=draw(change_lists()),
        errors=draw(faults),
        n_bytes=draw(counter),
        read_ms=draw(st.floats(0, 1e9)),
        final=draw(st.booleans()),
    )


@st.composite
def leased(draw: st.DrawFn) -> m.Leased:
    found = draw(st.lists(key, max_size=10, unique=True))
    cut = draw(st.integers(0, len(found)))
    places = draw(st.lists(slot, min_size=cut, max_size=cut, unique=True))
    held = [(*k, p, draw(counter)) for k, p in zip(found[:cut], places, strict=True)]
    missing = draw(_faults(set(found[cut:])))
    return m.Leased(draw(number), tuple(held), missing)


@st.composite
def rows_ready(draw: st.DrawFn) -> m.RowsReady:
    position = draw(st.integers(0, RING_ROWS))
    n_rows = draw(st.integers(0, RING_ROWS - position))
    row = st.tuples(st.integers(0, 2**32 - 1), code, text)
    return m.RowsReady(draw(number), position, n_rows, tuple(draw(st.lists(row, max_size=4))))


@st.composite
def tokens(draw: st.DrawFn) -> m.Tokens:
    found = draw(ids)
    logprobs = tuple(draw(finite) for _ in found) if draw(st.booleans()) else ()
    n_top = draw(st.integers(0, 3)) * len(found)
    top = draw(st.lists(st.tuples(small, finite), min_size=n_top, max_size=n_top))
    return m.Tokens(
        *(draw(number), found, logprobs, draw(values)),
        tuple(pair[0] for pair in top),
        tuple(pair[1] for pair in top),
    )


def _picks(found: Any) -> bytes:
    return np.array(found, PICK).tobytes()


@st.composite
def key_lists(draw: st.DrawFn) -> m.KeyList:
    found = sorted(draw(key_set))
    places = draw(st.lists(slot, min_size=len(found), max_size=len(found), unique=True))
    records = [(*k, place) for k, place in zip(found, places, strict=True)]
    return m.KeyList(draw(number), draw(counter), np.array(records, KEY_RECORD).tobytes())


settings_values = st.one_of(
    st.integers(-99, 99), finite, text, ids, st.lists(finite, max_size=4).map(tuple)
)
lease_pairs = st.lists(st.tuples(slot, counter), min_size=1, max_size=8, unique=True).map(tuple)
MESSAGES: dict[type, st.SearchStrategy[Any]] = {
    m.Hello: st.builds(
        m.Hello,
        version,
        st.sampled_from(m.ROLES),
        maybe16,
        maybe16,
        small,
        st.integers(1, 2**31 - 1),
    ),
    m.Welcome: welcomes(),
    m.Refused: st.builds(m.Refused, st.sampled_from(m.REFUSALS), text, small, small, counter),
    m.Bye: st.builds(m.Bye),
    m.MissRequest: st.builds(
        m.MissRequest,
        *(number, counter, layer, experts, slots, counter, counter),
        st.lists(key, max_size=6, unique=True).map(tuple),
    ),
    m.SlotChanges: slot_changes(),
    m.Stream: st.builds(
        m.Stream,
        *(number, counter, layer, experts, st.integers(1, 99), counter, counter, slots),
        st.lists(key, max_size=6, unique=True).map(tuple),
    ),
    m.Consumed: st.builds(m.Consumed, number, expert),
    m.Changes: st.builds(lambda v, c: m.Changes(v[0], v[1], c), versions(), change_lists()),
    m.Ack: st.builds(m.Ack, counter, counter, small),
    m.Resync: st.builds(m.Resync, counter, counter),
    m.Touch: st.builds(m.Touch, counter, key_set.map(lambda found: _picks(sorted(found)))),
    m.Hint: st.builds(m.Hint, counter, layer, ranked),
    m.Warm: st.builds(m.Warm, keys.map(lambda found: _picks(list(found)))),
    m.Fetch: st.builds(m.Fetch, number, keys, small),
    m.Leased: leased(),
    m.Busy: st.builds(m.Busy, number, small),
    m.Release: st.builds(m.Release, lease_pairs),
    m.RowRequest: st.builds(
        m.RowRequest,
        number,
        st.integers(0, 1),
        st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=RING_ROWS).map(
            lambda found: np.array(found, "<u4").tobytes()
        ),
    ),
    m.RowsReady: rows_ready(),
    m.KeyList: key_lists(),
    m.StatList: st.builds(m.StatList, number, values),
    m.Answered: st.builds(m.Answered, number, st.booleans(), text),
    m.Unquarantine: st.builds(m.Unquarantine, number, keys),
    m.Trace: st.builds(m.Trace, number, text, st.booleans()),
    m.Resize: st.builds(m.Resize, number, counter),
    m.Resized: st.builds(m.Resized, number, counter, text),
    m.Join: st.builds(m.Join, version, id16, st.integers(1, 2**31 - 1)),
    m.Joined: st.builds(m.Joined, number, counter, text, st.integers(1, 2**31 - 1), small, version),
    m.PromptPart: st.builds(m.PromptPart, number, ids),
    m.Generate: st.builds(
        m.Generate,
        *(number, ids, st.dictionaries(st.text(max_size=20), settings_values), small),
        st.binary(max_size=40),
    ),
    m.Queued: st.builds(m.Queued, number, small),
    m.Progress: st.builds(m.Progress, number, small, small),
    m.Tokens: tokens(),
    m.Done: st.builds(m.Done, number, st.sampled_from(m.ENDINGS), values),
    m.Status: st.builds(m.Status, number, st.booleans()),
    m.StatusReport: st.builds(m.StatusReport, number, values, st.binary(max_size=40)),
    m.Dropped: st.builds(m.Dropped, chunks),
    **{cls: st.builds(cls, chunks, small, counter) for cls in (m.Drop, m.Added)},
    **{
        cls: st.builds(cls, number)
        for cls in (
            *(m.Ping, m.Pong, m.Cancel, m.RowsDone, m.Keys, m.Stats),
            m.CancelGenerate,
        )
    },
}


def sample_messages() -> list[Any]:
    """One plain message of each kind, in the order of the kinds."""
    picks = _picks([(0, 1), (1, 3), (4, 11)])
    table = np.full(N_LAYERS * N_EXPERTS, -1, "<i4")
    table[3] = 7
    a_key, fault = ((1, 2),), ((1, 2, "EIO", "layer 1 expert 2: bad drive"),)
    samples: dict[type, tuple[Any, ...]] = {
        m.Hello: ((1, 0), "engine", b"f" * 16, b"", 6, 77),
        m.Welcome: (
            *(5, 2, b"a" * 16, 1 << 20, N_LAYERS, N_EXPERTS, N_SLOTS, 4096, 6, 4, "/run/x"),
            *(9, table.tobytes(), bytes(4 * N_SLOTS)),
        ),
        m.Refused: ("busy", "another engine", 500, 42),
        m.MissRequest: (8, 3, 1, (0, 2, 5), (1, 4), 7, 6, ((2, 3),)),
        m.SlotChanges: (8, 7, 9, (3, -1, 5), ((1, 0, 3), (1, 5, -1)), fault, 4096, 1.5, True),
        m.Stream: (8, 3, 1, (0, 2, 5), 2, 7, 6, (1, 4), ((2, 3),)),
        m.Consumed: (8, 2),
        m.Changes: (7, 8, ((1, 0, -1),)),
        m.Ack: (8, 6, 9),
        m.Resync: (8, 3),
        m.Touch: (3, picks),
        m.Hint: (3, 1, (5, 2)),
        m.Warm: (picks,),
        m.Fetch: (8, a_key, 100),
        m.Leased: (8, ((1, 3, 4, 9),), fault),
        m.Busy: (8, 20),
        m.Release: (((4, 9),),),
        m.RowRequest: (8, 1, b"\1\0\0\0\2\0\0\0", ((0, b"\3\0\0\0"),)),
        m.RowsReady: (8, 3, 2, ((1, "EIO", "bad"),)),
        m.KeyList: (8, 9, np.array([(1, 2, 3)], KEY_RECORD).tobytes()),
        m.StatList: (8, {"hits": 3, "rate": 0.5, "policy": "lfu"}),
        m.Answered: (8, True, ""),
        m.Unquarantine: (8, a_key),
        m.Trace: (8, "/tmp/trace", True),
        m.Resize: (8, 1 << 30),
        m.Resized: (8, 1 << 30, ""),
        m.Join: ((1, 0), b"f" * 16, 77),
        m.Joined: (5, 2, "/run/x/compute.life", 4096, 8),
        m.PromptPart: (8, (0, 5, 6)),
        m.Generate: (8, (0, 5, 6), {"temperature": 0.7, "stop_ids": (1, 2)}, 1000, b"{}"),
        m.Queued: (8, 2),
        m.Progress: (8, 64, 200),
        m.Tokens: (8, (5,), (-0.5,), {"hits": 6}, (5, 6), (-0.5, -1.5)),
        m.Done: (8, "stop", {"tokens": 1}),
        m.Status: (8, True),
        m.StatusReport: (8, {"state": "idle"}, b"\1\0"),
        m.Bye: (),
        m.Drop: ((0, 2), 8, 5),
        m.Dropped: ((0, 2),),
        m.Added: ((0, 2), 8, 5),
    }
    return [cls(*samples.get(cls, (8,))) for cls in KINDS]


_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**32, 2**63, 2**64 - 1, -(2**63), 0.0, 1.5),
    *(float("nan"), float("inf"), "", "x", b"", b"\0" * 16, [], {}, [[]], [1, 1], [2, 1]),
    *([True], [0.0], [[0, 0]], [[0, 0, 0], [0, 0, 0]], {"a": []}, {"a": None}, "\ud7ff"),
    *(msgpack.ExtType(5, b"x"), msgpack.Timestamp(1, 2), [msgpack.Timestamp(0)], 10**9, "é" * 9000),
)


def bad_frames(n_frames: int, seed: int = 0) -> Iterator[bytes]:
    """Random bytes, mutated frames, good frames with one wrong value, cut and doubled frames."""
    rng = random.Random(seed)
    frames = [encode(message, 5, 2) for message in sample_messages()]
    for number_of_frame in range(n_frames):
        yield _bad_frame(rng, frames, number_of_frame % 5)


def _bad_frame(rng: random.Random, frames: list[bytes], way: int) -> bytes:
    frame = bytearray(rng.choice(frames))
    if way == 0:
        return rng.randbytes(rng.randrange(80))
    if way == 1:
        for _ in range(rng.randrange(1, 5)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        return bytes(frame)
    if way == 2:
        return bytes(_with_odd_value(rng, bytes(frame)))
    if way == 3:
        cut = rng.randrange(len(frame) + 1)
        return bytes(frame[:cut] + rng.randbytes(rng.randrange(4)))
    at = rng.randrange(len(frame))
    return bytes(frame[:at] + rng.choice(frames) + frame[at:])


def _with_odd_value(rng: random.Random, frame: bytes) -> bytes:
    array = msgpack.unpackb(frame)
    place: Any = array
    at = rng.randrange(len(array))
    while type(place[at]) is list and place[at] and rng.random() < 0.7:
        place = place[at]
        at = rng.randrange(len(place))
    what = rng.random()
    if what < 0.15:
        del place[at]
    elif what < 0.25:
        place.insert(at, rng.choice(_ODD))
    else:
        place[at] = rng.choice(_ODD)
    return msgpack.packb(array)
