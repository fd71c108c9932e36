from __future__ import annotations

import time
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import ProtocolError
from protocol.wire import messages as m
from protocol.wire.codec import Bounds, CodecError, Envelope, decode, encode
from protocol.wire.fields import ANY
from protocol.wire.limits import MAX_FRAME_BYTES
from protocol.wire.quick import GLANCES
from protocol.wire.schema import FIELDS, KINDS, WHOLE
from tests.support.frames import BOUNDS, MESSAGES, bad_frames, sample_messages


@pytest.mark.parametrize("cls", list(KINDS), ids=lambda cls: cls.__name__)
def test_every_message_comes_back_as_it_was_sent(cls: type) -> None:
    @settings(max_examples=30, deadline=None)
    @given(message=MESSAGES[cls], session=st.integers(0, 2**63 - 1), generation=st.integers(0, 99))
    def check(message: Any, session: int, generation: int) -> None:
        frame = encode(message, session, generation)
        assert decode(frame) == Envelope(message, session, generation)
        assert decode(memoryview(frame), BOUNDS).message == message

    check()


def test_every_message_has_a_kind_a_check_a_field_and_a_sample() -> None:
    classes = set(get_args(m.Message))
    assert classes == set(KINDS) == set(FIELDS) == set(MESSAGES)
    assert len(set(KINDS.values())) == len(KINDS)
    assert all(0 < kind < 128 for kind in KINDS.values())
    assert classes == {
        cls for cls in vars(m).values() if is_dataclass(cls) and isinstance(cls, type)
    }
    for cls in classes:
        assert len(fields(cls)) == len(FIELDS[cls])
        assert cls.__doc__


def test_ten_thousand_bad_frames_raise_nothing_but_codec_errors() -> None:
    refused = []
    for frame in bad_frames(10_000, seed=7):
        try:
            decode(frame, BOUNDS if len(frame) % 2 else None)
        except CodecError as error:
            refused.append(error)
    assert len(refused) > 8_000
    assert {error.reason for error in refused} == {"malformed"}
    assert max(len(str(error)) for error in refused) < 1000
    assert len({error.fault for error in refused}) == 7


@settings(max_examples=300, deadline=None)
@given(frame=st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_codec_errors(frame: bytes) -> None:
    with pytest.raises(CodecError):
        decode(frame)


@pytest.mark.parametrize(
    "frame",
    [
        b"\xdd\x00\x03\xff\xff" * 2000,
        b"\xdc\x08\xff" * 900,
        b"\x91" * 100_000,
        b"\x91" * 1000 + b"\xc0",
        b"\x81\xa1a" * 1000 + b"\xc0",
        b"\xdc\xff\xff" + b"\x93\x01\x02\x03" * 65535,
        b"\xc6\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x93\x04\x00\x00\xc0",
    ],
)
def test_deep_and_lying_frames_are_refused_quickly(frame: bytes) -> None:
    began = time.monotonic()
    with pytest.raises(CodecError):
        decode(frame)
    assert time.monotonic() - began < 5


def test_frame_over_one_mebibyte_is_refused_both_ways() -> None:
    with pytest.raises(CodecError, match="wanted at most 1048576") as caught:
        decode(b"\xc0" * (MAX_FRAME_BYTES + 1))
    assert (caught.value.fault, caught.value.reason) == ("size", "malformed")
    with pytest.raises(CodecError, match=r"Generate: frame of \d+ bytes"):
        encode(m.Generate(1, (2**31 - 1,) * 250_000, {}, 0))


def test_unknown_kind_is_refused() -> None:
    for kind in (0, 7, 97, 127, 300, -1, True, "1", 1.0, None, [1]):
        with pytest.raises(CodecError, match="kind") as caught:
            decode(msgpack.packb([kind, 1, 1, 2]))
        assert caught.value.fault == "kind"


def test_codec_error_is_a_protocol_error_and_knows_the_request() -> None:
    frame = msgpack.packb([KINDS[m.MissRequest], 5, 2, 31, 0, 9, [1], [], 0, 0])
    with pytest.raises(ProtocolError, match=r"MissRequest\.layer: found layer 9, wanted 0 to 4"):
        decode(frame, BOUNDS)
    with pytest.raises(CodecError) as caught:
        decode(frame, BOUNDS)
    assert caught.value.request == 31
    assert caught.value.fault == "range"


MISS = m.MissRequest(1, 2, 3, (4, 5), (6, 7), 8, 9, ((1, 1), (0, 0)))
CHANGES = m.SlotChanges(1, 5, 6, (3, -1), ((0, 1, 3), (1, 0, -1)), (), 10, 0.5, True)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        (MISS, {"experts": (5, 4)}),
        (MISS, {"experts": (4, 4)}),
        (MISS, {"experts": ()}),
        (MISS, {"experts": (4, 12)}),
        (MISS, {"experts": (-1, 4)}),
        (MISS, {"experts": (True, 4)}),
        (MISS, {"experts": (4.0, 5)}),
        (MISS, {"experts": None}),
        (MISS, {"experts": "45"}),
        (MISS, {"layer": 5}),
        (MISS, {"layer": True}),
        (MISS, {"busy": (7, 6)}),
        (MISS, {"busy": (20,)}),
        (MISS, {"hints": ((0, 0), (0, 0))}),
        (MISS, {"hints": ((0, 0, 0),)}),
        (MISS, {"hints": ((5, 0),)}),
        (MISS, {"request": 0}),
        (MISS, {"request": 2**63}),
        (MISS, {"applied": -1}),
        (MISS, {"applied": 1.0}),
        (CHANGES, {"to_version": 4}),
        (CHANGES, {"slots": (3, 3)}),
        (CHANGES, {"slots": (20,)}),
        (CHANGES, {"slots": (-2,)}),
        (CHANGES, {"slots": (False,)}),
        (CHANGES, {"changes": ((1, 0, -1), (0, 1, 3))}),
        (CHANGES, {"changes": ((0, 1, 3), (0, 1, 4))}),
        (CHANGES, {"changes": ((0, 1, 3), (0, 2, 3))}),
        (CHANGES, {"changes": ((0, 1, -1.0),)}),
        (CHANGES, {"changes": ((0, 1, -2),)}),
        (CHANGES, {"changes": ((0, 12, 2),)}),
        (CHANGES, {"errors": ((0, 1, "WRONG", ""),)}),
        (CHANGES, {"errors": ((0, 1, "EIO", b""),)}),
        (CHANGES, {"errors": ((0, 1, "EIO", "a"), (0, 1, "EIO", "b"))}),
        (CHANGES, {"final": 1}),
        (CHANGES, {"read_ms": float("nan")}),
        (CHANGES, {"read_ms": -1.0}),
        (CHANGES, {"read_ms": True}),
        (m.Touch(1, b""), {"picks": b"\0\0\0"}),
        (m.Touch(1, b""), {"picks": b"\1\0\0\0\0\0\0\0"}),
        (m.Touch(1, b""), {"picks": b"\0\0\0\0\0\0\0\0"}),
        (m.Touch(1, b""), {"picks": b"\5\0\0\0"}),
        (m.Touch(1, b""), {"picks": b"\0\0\x0c\0"}),
        (m.Touch(1, b""), {"picks": "ab"}),
        (m.Fetch(1, ((0, 0),), 5), {"keys": ()}),
        (m.Fetch(1, ((0, 0),), 5), {"keys": ((0, 0), (0, 0))}),
        (m.Fetch(1, ((0, 0),), 5), {"wait_ms": 2**31}),
        (m.Leased(1, ((0, 0, 1, 1),), ()), {"errors": ((0, 0, "EIO", ""),)}),
        (m.Leased(1, ((0, 0, 1, 1),), ()), {"leases": ((0, 0, 1, 1), (0, 1, 1, 1))}),
        (m.RowRequest(1, 0, b"\0" * 4), {"rows": b""}),
        (m.RowRequest(1, 0, b"\0" * 4), {"rows": b"\0" * 5}),
        (m.RowRequest(1, 0, b"\0" * 4), {"rows": b"\0" * 4 * 65}),
        (m.RowRequest(1, 0, b"\0" * 4), {"table": 2}),
        (m.RowsReady(1, 0, 4, ()), {"position": 61}),
        (m.RowsReady(1, 0, 4, ()), {"errors": ((2**32, "EIO", ""),)}),
        (m.KeyList(1, 0, b""), {"keys": b"\0" * 7}),
        (m.KeyList(1, 0, b""), {"keys": b"\0" * 16}),
        (m.KeyList(1, 0, b""), {"keys": b"\0\0\0\0\xff\xff\xff\xff"}),
        (m.StatList(1, {}), {"values": {"a": True}}),
        (m.StatList(1, {}), {"values": {"a": None}}),
        (m.StatList(1, {}), {"values": {"a": (1,)}}),
        (m.StatList(1, {}), {"values": {"a": float("inf")}}),
        (m.Tokens(1, (1, 2), (), {}), {"logprobs": (0.5,)}),
        (m.Hello((1, 0), "reader", b"", b"", 0, 1), {"role": "king"}),
        (m.Hello((1, 0), "reader", b"", b"", 0, 1), {"fingerprint": b"x"}),
        (m.Hello((1, 0), "reader", b"", b"", 0, 1), {"version": (1,)}),
        (m.Refused("busy", "", 0, 0), {"reason": "because"}),
        (m.Refused("busy", "", 0, 0), {"text": "x" * 9000}),
        (m.Drop((1,)), {"chunks": ()}),
        (m.Release(((1, 1),)), {"leases": ((1, 1), (1, 1))}),
    ],
)
def test_wrong_value_is_refused_on_receipt(message: Any, change: dict[str, Any]) -> None:
    decode(encode(message), BOUNDS)
    values = [getattr(message, field.name) for field in fields(message)]
    for name, value in change.items():
        values[[field.name for field in fields(message)].index(name)] = value
    frame = msgpack.packb([KINDS[type(message)], 1, 1, *values])
    with pytest.raises(CodecError, match=type(message).__name__):
        decode(frame, BOUNDS)
    try:
        encode(replace(message, **change))
    except CodecError:
        return
    # What only the bounds forbid may be sent, not received.
    decode(encode(replace(message, **change)), None)


def test_numpy_integers_are_refused_before_they_are_sent() -> None:
    with pytest.raises(CodecError, match="wanted an integer"):
        encode(replace(MISS, experts=(np.int64(4), 5)))  # type: ignore[arg-type]
    with pytest.raises(CodecError):
        encode(MISS, session=True)
    with pytest.raises(CodecError, match="surrogates"):
        encode(m.Answered(1, False, "\udcff"))
    with pytest.raises(CodecError, match="no message"):
        encode("hello")  # type: ignore[arg-type]


def test_welcome_is_checked_against_its_own_counts() -> None:
    welcome = next(msg for msg in sample_messages() if isinstance(msg, m.Welcome))
    for change in (
        {"table": welcome.table[:-4]},
        {"scores": welcome.scores + b"\0\0\0\0"},
        {"n_slots": welcome.n_slots - 1},
        {"n_layers": welcome.n_layers + 1},
        {"table": np.full(60, 20, "<i4").tobytes()},
        {"table": np.full(60, 3, "<i4").tobytes()},
        {"scores": np.full(20, np.nan, "<f4").tobytes()},
        {"arena_id": b""},
    ):
        with pytest.raises(CodecError, match="Welcome"):
            encode(replace(welcome, **change))


def test_fields_of_a_newer_minor_version_are_passed_over() -> None:
    for message in sample_messages():
        array = msgpack.unpackb(encode(message, 5, 2))
        newer: list[list[Any]] = [[1], ["text", None], [[1, [2.5]], {"a": b"b"}]]
        for extra in newer:
            assert decode(msgpack.packb(array + extra), BOUNDS).message == message
        wrong: list[list[Any]] = [
            [0] * 17,
            [msgpack.Timestamp(1)],
            [[{"a": [msgpack.ExtType(1, b"")]}]],
        ]
        for extra in wrong:
            with pytest.raises(CodecError, match="unreadable fields"):
                decode(msgpack.packb(array + extra), BOUNDS)


def test_missing_trailing_fields_get_their_defaults() -> None:
    array = msgpack.unpackb(encode(replace(MISS, hints=())))
    assert decode(msgpack.packb(array[:-1])).message == replace(MISS, hints=())
    with pytest.raises(CodecError, match="found 6 fields, wanted 8"):
        decode(msgpack.packb(array[:-2]))
    refused = msgpack.unpackb(encode(m.Refused("busy", "x", 5, 6, 7)))
    assert decode(msgpack.packb(refused[:-1])).message == m.Refused("busy", "x", 5, 6, 0)


def test_a_full_table_of_the_real_model_fits_in_a_frame() -> None:
    n_layers, n_experts, n_slots = 40, 384, 15_360
    bounds = Bounds(n_layers, n_experts, n_slots)
    changes = tuple((k // n_experts, k % n_experts, k) for k in range(n_slots))
    frame = encode(m.Changes(0, 1, changes))
    assert decode(frame, bounds).message == m.Changes(0, 1, changes)
    table = np.arange(n_slots, dtype="<i4").tobytes()
    welcome = next(msg for msg in sample_messages() if isinstance(msg, m.Welcome))
    welcome = replace(
        *(welcome,),
        n_layers=40,
        n_experts=384,
        n_slots=n_slots,
        table=table,
        scores=bytes(4 * n_slots),
    )
    assert decode(encode(welcome)).message == welcome


@pytest.mark.parametrize("cls", list(GLANCES), ids=lambda cls: cls.__name__)
def test_a_glance_lets_nothing_pass_that_the_checks_refuse_or_change(cls: type) -> None:
    small = st.one_of(st.integers(-2, 12), st.booleans())
    odd = st.one_of(
        st.integers(-2, 12),
        st.sampled_from([True, False, None, 2**31, 2**63 - 1, 2**63, -1.0, 0.5, 1e300, "a"]),
        st.sampled_from([float("nan"), float("inf"), b"", b"abc", b"abcd", b"abcd" * 40]),
        st.lists(st.one_of(st.integers(-2, 40), st.booleans(), st.floats()), max_size=8).map(tuple),
        st.sets(st.integers(0, 99), max_size=70).map(lambda found: tuple(sorted(found))),
        st.lists(st.integers(0, 30), unique=True, max_size=9).map(tuple),
        st.lists(st.tuples(small, small, small), max_size=4).map(tuple),
        st.sets(st.tuples(small, small, small), max_size=4).map(lambda found: tuple(sorted(found))),
    )
    passed = []

    @settings(max_examples=200, deadline=None)
    @given(data=st.data(), message=MESSAGES[cls])
    def check(data: st.DataObject, message: Any) -> None:
        values = [getattr(message, field.name) for field in fields(cls)]
        for place in data.draw(st.sets(st.integers(0, len(values) - 1), max_size=2)):
            values[place] = data.draw(odd)
        bounds = data.draw(st.sampled_from([BOUNDS, ANY]))
        if GLANCES[cls](values, bounds):
            passed.append(1)
            checked = [
                check(value, bounds) for check, value in zip(FIELDS[cls], values, strict=True)
            ]
            assert checked == values
            assert [type(value) for value in checked] == [type(value) for value in values]
            if cls in WHOLE:
                WHOLE[cls](cls(*checked), bounds)

    check()
    assert passed
