"""A trace's bytes: what was written is read, whatever is cut off or damaged."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_daemon import trace_format
from expert_daemon.routing_trace import TraceShape
from expert_daemon.trace_format import (
    BLOCK_BYTES,
    HEADER_BYTES,
    PICK,
    Step,
    decode_blocks,
    decode_header,
    encode_blocks,
    encode_header,
    is_token,
    step_of_picks,
)
from protocol.errors import ConfigError

SHAPE = TraceShape(3, 10, 2, expert_bytes=100, slot_bytes=4096, fingerprint=b"0123456789abcdef")
FLASH = TraceShape(40, 384, 6, expert_bytes=100, slot_bytes=4096)


def token(number, *experts):
    keys = [10 * layer + expert for layer, own in enumerate(experts) for expert in own]
    return Step(number, np.array(keys, np.int64), True)


def chunk(number, *keys):
    return Step(number, np.array(keys, np.int64), False)


STEPS = [
    token(0, (1, 2), (0, 9), (3, 4)),
    token(1, (1, 5), (0, 9), (3, 9)),
    chunk(2, 0, 1, 2, 10, 29),
    chunk(3),
    token(4, (0, 1), (0, 1), (0, 1)),
]


def blocks(*steps):
    return [block for step in steps for block in encode_blocks([step], SHAPE, 7)]


def same(found, expected):
    assert [(s.number, s.keys.tolist(), s.is_token) for s in found] == [
        (s.number, s.keys.tolist(), s.is_token) for s in expected
    ]


def test_what_was_written_is_read():
    data = encode_header(SHAPE, 5, 7) + b"".join(encode_blocks(STEPS, SHAPE, 7))
    assert decode_header(data, "x") == (SHAPE, 5)
    found = decode_blocks(data, SHAPE)
    same(found.steps, STEPS)
    assert (found.end, found.n_bytes_skipped, found.n_bytes_torn) == (len(data), 0, 0)


def test_a_token_takes_twelve_bytes_a_layer():
    keys = np.concatenate([np.arange(6) + 384 * layer for layer in range(40)])
    one, two = (len(b"".join(encode_blocks([Step(0, keys, True)] * n, FLASH, 0))) for n in (1, 2))
    assert two - one == 40 * 12 + 4


def test_steps_of_one_kind_share_blocks_up_to_a_size(monkeypatch):
    assert len(list(encode_blocks(STEPS, SHAPE, 0))) == 3
    monkeypatch.setattr(trace_format, "MAX_BLOCK_BYTES", 40)
    written = list(encode_blocks([STEPS[0]] * 5, SHAPE, 0))
    assert len(written) == 3
    same(decode_blocks(bytes(HEADER_BYTES) + b"".join(written), SHAPE).steps, [STEPS[0]] * 5)


def test_a_file_cut_at_any_byte_keeps_every_whole_block():
    written = blocks(*STEPS)
    data = encode_header(SHAPE, 0, 7) + b"".join(written)
    ends = np.cumsum([HEADER_BYTES, *map(len, written)]).tolist()
    for cut in range(HEADER_BYTES, len(data) + 1):
        found = decode_blocks(data[:cut], SHAPE)
        n_whole = sum(end <= cut for end in ends) - 1
        same(found.steps, STEPS[:n_whole])
        assert found.end == ends[n_whole]
        assert found.n_bytes_torn == cut - ends[n_whole]
        assert found.n_bytes_skipped == 0


def test_a_header_cut_at_any_byte_is_refused():
    data = encode_header(SHAPE, 0, 7)
    for cut in range(HEADER_BYTES):
        with pytest.raises(ConfigError, match=r"^here: "):
            decode_header(data[:cut], "here")


def test_any_damaged_byte_costs_its_block_alone():
    written = blocks(*STEPS)
    data = bytearray(encode_header(SHAPE, 0, 7) + b"".join(written))
    ends = np.cumsum([HEADER_BYTES, *map(len, written)]).tolist()
    for place in range(HEADER_BYTES, len(data)):
        data[place] ^= 0x55
        hit = sum(end <= place for end in ends) - 1
        found = decode_blocks(bytes(data), SHAPE)
        same(found.steps, STEPS[:hit] + STEPS[hit + 1 :])
        lost = found.n_bytes_skipped + found.n_bytes_torn
        assert lost == len(written[hit])
        data[place] ^= 0x55


def test_any_damaged_byte_of_the_header_is_noticed():
    data = bytearray(encode_header(SHAPE, 0, 7))
    for place in range(HEADER_BYTES):
        data[place] ^= 0x10
        with pytest.raises(ConfigError):
            decode_header(bytes(data), "here")
        data[place] ^= 0x10


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_holds_no_step(data):
    found = decode_blocks(bytes(HEADER_BYTES) + b"HRB\n" + data, SHAPE)
    assert found.steps == []


@pytest.mark.parametrize(
    "step",
    [
        Step(0, np.array([0, 9, 10, 19, 20, 30]), True),  # an expert that the model does not have
        Step(0, np.array([0, 0, 10, 19, 20, 29]), True),  # twice the same
        Step(0, np.array([0, 9, 10, 19, 20]), True),  # one too few
        Step(0, np.array([0, 1, 30]), False),
        Step(0, np.array([0, 1, 1]), False),
    ],
)
def test_a_block_that_makes_no_sense_is_left_out(step):
    data = bytes(HEADER_BYTES) + blocks(step)[0]
    found = decode_blocks(data + blocks(STEPS[0])[0], SHAPE)
    assert found.n_bytes_skipped == len(data) - HEADER_BYTES
    same(found.steps, STEPS[:1])


def test_a_block_of_a_later_kind_is_left_out():
    data = bytearray(blocks(STEPS[0])[0])
    data[4] = 9
    head = bytes(data[: BLOCK_BYTES - 8])
    digest = xxhash.xxh3_64_intdigest(head + bytes(data[BLOCK_BYTES:]))
    data[BLOCK_BYTES - 8 : BLOCK_BYTES] = struct.pack("<Q", digest)
    found = decode_blocks(bytes(HEADER_BYTES) + bytes(data) + blocks(STEPS[1])[0], SHAPE)
    same(found.steps, STEPS[1:2])


def test_picks_in_any_order_make_a_step():
    pairs = np.array([(2, 4), (0, 2), (1, 9), (0, 1), (2, 3), (1, 0), (0, 1)], PICK)
    same([step_of_picks(0, pairs.tobytes(), SHAPE)], [STEPS[0]])
    pairs = np.array([(2, 4), (3, 0), (0, 10)], PICK)
    same([step_of_picks(1 << 32 | 6, pairs.tobytes(), SHAPE)], [chunk(6, 24)])


def test_a_token_has_top_k_picks_in_every_layer():
    assert is_token(STEPS[0].keys, SHAPE)
    assert not is_token(np.array([0, 1, 2, 10, 20, 21]), SHAPE)
    assert not is_token(np.arange(0), SHAPE)


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (TraceShape(0, 10, 2, 100, 4096), "makes no sense"),
        (TraceShape(3, 10, 11, 100, 4096), "makes no sense"),
        (TraceShape(3, 10, 2, 5000, 4096), "makes no sense"),
    ],
)
def test_a_header_of_an_impossible_model_is_refused(shape, text):
    with pytest.raises(ConfigError, match=text):
        decode_header(encode_header(shape, 0, 0), "here")


def test_a_later_version_is_refused_by_its_number(monkeypatch):
    monkeypatch.setattr(trace_format, "VERSION", 2)
    data = encode_header(SHAPE, 0, 0)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="trace version 2, this program reads 1"):
        decode_header(data, "here")
