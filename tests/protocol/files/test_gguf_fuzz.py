"""Damaged GGUF files in, ShardError or safe ranges out: never a crash, no greedy allocation."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.errors import ShardError
from protocol.files.gguf_cursor import WINDOW_BYTES
from protocol.files.gguf_header import GgufHeader, read_gguf_header
from protocol.files.gguf_values import GgufArray
from tests.support.fake_gguf import FakeTensor, Typed, gguf_bytes

METADATA = {
    "general.architecture": Typed("string", "deepseek41"),
    "general.alignment": Typed("u32", 32),
    "a.u64": Typed("u64", 1 << 60),
    "a.bool": Typed("bool", True),
    "a.f64": Typed("f64", 1.0),
    "a.integers": Typed("array:i64", [1, 2, 3]),
    "a.strings": Typed("array:string", ["one", "two", "three"]),
}
TENSORS = [
    FakeTensor("norm.weight", (8,), 0, bytes(32)),
    FakeTensor("blk.0.attn_q_a.weight", (256, 2), 10, bytes(168)),
    FakeTensor("blk.0.ffn_gate_exps.weight", (32, 2, 3), 8, bytes(34 * 6)),
]
GOOD = gguf_bytes(METADATA.items(), TENSORS)
HEADER_BYTES = len(GOOD) - sum(-(-len(tensor.data) // 32) * 32 for tensor in TENSORS) + 28
N_MUTATED = 2000
# What a field of eight or four bytes is set to: the edges of every integer type.
EDGES = [0, 1, 2, 7, 8, 9, 13, 31, 33, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40]
EDGES += [1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 32, (1 << 64) - 1]


def must_be_safe(header: GgufHeader, n_bytes: int) -> None:
    end = 0
    for tensor in sorted(header.tensors, key=lambda tensor: tensor.offset):
        assert tensor.offset >= max(end, header.data_offset)
        end = tensor.offset + tensor.n_bytes
        rows = tensor.n_bytes // tensor.row_bytes
        assert rows * tensor.row_bytes == tensor.n_bytes > 0
    assert end <= n_bytes
    assert len({tensor.name for tensor in header.tensors}) == len(header.tensors)
    for value in header.metadata.values():
        if not isinstance(value, GgufArray):
            continue
        assert value.offset + value.n_bytes <= n_bytes
        with suppress(ShardError):
            list(value.strings()) if value.element_type == 8 else value.numbers()


def check(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)  # a truncated file is flushed when it is closed, a new one is not
    path.write_bytes(data)
    try:
        header = read_gguf_header(path)
    except ShardError as error:
        must_be_readable(path, str(error))
        return
    must_be_safe(header, len(data))


def must_be_readable(path: Path, message: str) -> None:
    assert message.startswith(f"{path}: ")
    assert message.encode()  # no lone surrogate may reach a terminal
    assert len(message) < 1000 + len(str(path))


def test_the_good_file_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(GOOD)
    header = read_gguf_header(path)
    assert len(header.tensors) == 3
    must_be_safe(header, len(GOOD))


def mutated(generator: random.Random) -> bytes:
    data = bytearray(GOOD)
    for _ in range(generator.randint(1, 3)):
        at = generator.randrange(HEADER_BYTES)
        kind = generator.randrange(6)
        if kind == 0:
            data[at] ^= 1 << generator.randrange(8)
        elif kind == 1:
            data[at] = generator.randrange(256)
        elif kind == 2:
            data[at : at + 8] = struct.pack("<Q", generator.choice(EDGES))
        elif kind == 3:
            data[at : at + 4] = struct.pack("<I", generator.choice(EDGES) & 0xFFFFFFFF)
        elif kind == 4:
            del data[at : at + generator.randint(1, 40)]
        else:
            data[at:at] = data[generator.randrange(at + 1) : at]
    if generator.random() < 0.1:
        del data[generator.randrange(len(data)) :]
    return bytes(data)


def test_two_thousand_mutated_files_are_refused_or_safe(tmp_path: Path) -> None:
    generator = random.Random(41)
    for _ in range(N_MUTATED):
        check(tmp_path / "x.gguf", mutated(generator))


def test_every_truncation_is_refused_or_safe(tmp_path: Path) -> None:
    for length in range(len(GOOD)):
        check(tmp_path / "x.gguf", GOOD[:length])


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(st.tuples(st.integers(0, HEADER_BYTES), st.binary(max_size=9)), max_size=4),
    cut=st.integers(0, 8),
)
def test_edited_bytes_are_refused_or_safe(
    tmp_path: Path, edits: list[tuple[int, bytes]], cut: int
) -> None:
    data = GOOD
    for position, new in edits:
        data = data[:position] + new + data[position + cut :]
    check(tmp_path / "x.gguf", data)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tail=st.binary(max_size=80), version=st.sampled_from([2, 3]))
def test_random_bytes_are_refused_or_safe(tmp_path: Path, tail: bytes, version: int) -> None:
    check(tmp_path / "x.gguf", struct.pack("<4sI", b"GGUF", version) + tail)


@pytest.mark.parametrize("edge", EDGES)
def test_no_lying_number_makes_the_reader_allocate_or_read_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edge: int
) -> None:
    path = tmp_path / "x.gguf"
    ends: list[int] = []
    real_pread = os.pread

    def watched_pread(descriptor: int, n_bytes: int, offset: int) -> bytes:
        ends.append(offset + n_bytes)
        return real_pread(descriptor, n_bytes, offset)

    monkeypatch.setattr("protocol.files.gguf_cursor.os.pread", watched_pread)
    tracemalloc.start()
    for at in range(4, HEADER_BYTES, 4):
        data = bytearray(GOOD)
        data[at : at + 8] = struct.pack("<Q", edge)
        check(path, bytes(data))
        assert max(ends, default=0) <= len(data)
        ends.clear()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * WINDOW_BYTES


def test_a_huge_sparse_file_costs_no_more_than_its_header(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
    for value in (
        struct.pack("<IIQ", 9, 8, 1 << 36),  # as many strings of no bytes as the file has room for
        struct.pack("<IIQ", 9, 10, 1 << 36),
        struct.pack("<IQ", 8, 1 << 39),
    ):
        path.write_bytes(head + value)
        os.truncate(path, 1 << 40)
        tracemalloc.start()
        with pytest.raises(ShardError):
            read_gguf_header(path)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 * WINDOW_BYTES


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    strings=st.lists(st.binary(max_size=40), max_size=60),
    pad=st.integers(WINDOW_BYTES - 700, WINDOW_BYTES + 50),
)
def test_strings_across_a_windows_edge_are_read_whole(
    tmp_path: Path, strings: list[bytes], pad: int
) -> None:
    path = tmp_path / "x.gguf"
    texts = [text.hex() for text in strings]
    metadata = [
        ("pad", Typed("string", "x" * pad)),
        ("texts", Typed("array:string", texts)),
        ("last", Typed("u64", 77)),
    ]
    path.write_bytes(gguf_bytes(metadata, TENSORS))
    header = read_gguf_header(path)
    assert header.metadata["last"] == 77
    array = header.metadata["texts"]
    assert isinstance(array, GgufArray)
    assert list(array.strings()) == texts
