"""The bytes of guess traces."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from protocol.errors import ConfigError
from protocol.files.guess_format import (
    BLOCK_BYTES,
    HEADER_BYTES,
    NO_EXPERT,
    GuessShape,
    decode_blocks,
    decode_header,
    encode_block,
    encode_header,
)

SHAPE = GuessShape(5, 40, 4, fingerprint=b"f" * 16)


def records(n: int, first: int = 0) -> NDArray[np.void]:
    dice = np.random.default_rng(first)
    made = np.zeros(n, SHAPE.record)
    made["position"] = np.arange(first, first + n)
    made["picks"] = np.sort(dice.permuted(np.tile(np.arange(40), (n, 5, 1)), axis=2)[..., :4])
    made["guesses"] = np.sort(dice.permuted(np.tile(np.arange(40), (n, 5, 3, 1)), axis=3)[..., :4])
    for distance in range(1, 4):
        made["guesses"][:, :distance, distance - 1] = NO_EXPERT
    return made


def whole() -> bytes:
    return encode_header(SHAPE, 1) + encode_block(records(3)) + encode_block(records(2, 3))


def test_what_was_written_is_read() -> None:
    data = whole()
    assert decode_header(data, "x") == SHAPE
    found = decode_blocks(data, SHAPE)
    assert np.array_equal(found.records, np.concatenate([records(3), records(2, 3)]))
    assert (found.end, found.n_bytes_skipped, found.n_bytes_torn) == (len(data), 0, 0)
    assert SHAPE.record.itemsize == 4 + 5 * 4 * 2 + 5 * 3 * 4 * 2
    assert GuessShape(40, 384, 6).record.itemsize == 1924


def test_a_cut_at_any_byte_leaves_the_whole_blocks() -> None:
    data = whole()
    first = HEADER_BYTES + BLOCK_BYTES + 3 * SHAPE.record.itemsize
    for size in range(HEADER_BYTES, len(data)):
        found = decode_blocks(data[:size], SHAPE)
        assert len(found.records) == (3 if size >= first else 0)
        assert found.end == (first if size >= first else HEADER_BYTES)
        assert found.n_bytes_torn == size - found.end


def test_a_damaged_block_is_passed_over() -> None:
    data = bytearray(whole())
    for place in range(HEADER_BYTES, HEADER_BYTES + BLOCK_BYTES + 3 * SHAPE.record.itemsize, 7):
        other = data.copy()
        other[place] ^= 1
        found = decode_blocks(bytes(other), SHAPE)
        assert found.records["position"].tolist() == [3, 4]
        assert found.n_bytes_skipped > 0


@pytest.mark.parametrize("spoil", ["picks", "guesses", "nothing"])
def test_picks_that_are_none_are_damage(spoil: str) -> None:
    made = records(1)
    if spoil == "picks":
        made["picks"][0, 1, 3] = 40
    elif spoil == "guesses":
        made["guesses"][0, 4, 0, :2] = 7
    else:
        made["guesses"][0, 0, 0] = [1, 2, 3, 4]
    data = encode_header(SHAPE, 1) + encode_block(made)
    assert len(decode_blocks(data, SHAPE).records) == 0


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"HRTRACE\n" + bytes(99), "not a guess trace"),
        (encode_header(SHAPE, 1)[:-1], "55 bytes"),
        (b"HRAHEAD\n\x02" + encode_header(SHAPE, 1)[9:], "version 2"),
        (encode_header(SHAPE, 1)[:-1] + b"x", "damaged"),
        (encode_header(GuessShape(5, 4, 6), 1), "makes no sense"),
    ],
)
def test_another_header_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        decode_header(data, "x")
