"""The GGUF header reader: what it reads, and what it refuses by name."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from protocol.errors import ShardError
from protocol.files import gguf_header
from protocol.files.gguf_cursor import WINDOW_BYTES
from protocol.files.gguf_header import GgufHeader, read_gguf_header
from protocol.files.gguf_values import GgufArray
from tests.support.fake_gguf import FakeTensor, Typed, gguf_bytes, string, write_gguf

F32, Q8_0, Q2_K = 0, 8, 10
MULTIPLIER = 9007199254740993  # 2^53 + 1: a double would lose the 1
METADATA = {
    "general.architecture": Typed("string", "deepseek41"),
    "a.u8": Typed("u8", 255),
    "a.i8": Typed("i8", -128),
    "a.u16": Typed("u16", 65535),
    "a.i16": Typed("i16", -2),
    "a.u32": Typed("u32", (1 << 32) - 1),
    "a.i32": Typed("i32", -(1 << 31)),
    "a.f32": Typed("f32", 0.5),
    "a.bool": Typed("bool", True),
    "a.u64": Typed("u64", (1 << 64) - 1),
    "a.i64": Typed("i64", (1 << 53) + 1),
    "a.f64": Typed("f64", 1e-300),
    "a.integers": Typed("array:i64", [MULTIPLIER, (1 << 63) - 1, -1]),
    "a.floats": Typed("array:f32", [1.5, 2.5]),
    "a.strings": Typed("array:string", ["one", "", "drei \u00fc"]),
    "a.last": Typed("u32", 7),
}
TENSORS = [
    FakeTensor("first.weight", (3,), F32, bytes(range(12))),
    FakeTensor("blk.0.second.weight", (32, 5), Q8_0, b"\x01" * 170),
    FakeTensor("blk.0.third.weight", (256, 2, 3), Q2_K, b"\x02" * 84 * 6),
]


def read(tmp_path: Path, data: bytes) -> GgufHeader:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    return read_gguf_header(path)


def array_of(header: GgufHeader, key: str) -> GgufArray:
    array = header.metadata[key]
    assert isinstance(array, GgufArray)
    return array


def refused(tmp_path: Path, data: bytes) -> str:
    with pytest.raises(ShardError) as caught:
        read(tmp_path, data)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "x.gguf"))
    assert message.encode()
    return message


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_metadata_and_tensors_are_read_as_written(tmp_path, version, alignment):
    path = write_gguf(tmp_path / "x.gguf", METADATA, TENSORS, version=version, alignment=alignment)
    header = read_gguf_header(path)
    assert (header.version, header.alignment) == (version, alignment)
    assert header.shard.n_bytes == path.stat().st_size
    assert header.data_offset % alignment == 0
    for key, (kind, value) in METADATA.items():
        found = header.metadata[key]
        if not kind.startswith("array:"):
            assert (found, type(found)) == (value, type(value))
            continue
        assert isinstance(found, GgufArray)
        assert found.count == len(value)
        if kind == "array:string":
            assert list(found.strings()) == value
        elif kind == "array:i64":
            assert found.integers() == tuple(value)
        else:
            assert found.numbers().tolist() == value
    data = path.read_bytes()
    for tensor, wanted in zip(header.tensors, TENSORS, strict=True):
        assert (tensor.name, tensor.dims) == wanted[:2]
        assert tensor.shape == wanted.dims[::-1]
        assert tensor.block.type_id == wanted.type_id
        assert tensor.offset % alignment == 0
        assert data[tensor.offset : tensor.offset + tensor.n_bytes] == wanted.data
    assert header.tensors[2].row_bytes == 84


def test_a_file_of_the_gguf_packages_writer_is_read(tmp_path):
    path = tmp_path / "theirs.gguf"
    writer = gguf.GGUFWriter(path, "deepseek41")
    writer.add_uint64("deepseek41.big", (1 << 64) - 1)
    writer.add_array("deepseek41.primes", [16000057, 16000079])
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    values = np.arange(10, dtype=np.float32).reshape(2, 5)
    writer.add_tensor("x.weight", values)
    blocks = np.ones((3, 2 * 84), np.uint8)
    writer.add_tensor("y.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q2_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_gguf_header(path)
    assert header.metadata["general.architecture"] == "deepseek41"
    assert header.metadata["deepseek41.big"] == (1 << 64) - 1
    x, y = header.tensors
    assert (x.name, x.dims, x.block.name) == ("x.weight", (5, 2), "F32")
    assert (y.name, y.dims, y.block.name) == ("y.weight", (512, 3), "Q2_K")
    data = path.read_bytes()
    assert data[x.offset : x.offset + x.n_bytes] == values.tobytes()
    assert data[y.offset : y.offset + y.n_bytes] == blocks.tobytes()


def test_the_gguf_packages_reader_reads_our_writer(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", METADATA, TENSORS, alignment=64)
    theirs = gguf.GGUFReader(path)
    ours = read_gguf_header(path)
    assert [t.name for t in theirs.tensors] == [t.name for t in ours.tensors]
    assert [t.data_offset for t in theirs.tensors] == [t.offset for t in ours.tensors]
    assert [t.n_bytes for t in theirs.tensors] == [t.n_bytes for t in ours.tensors]
    del theirs


def test_tensors_past_4_gib_of_a_sparse_file_are_placed(tmp_path):
    big = FakeTensor("big.weight", (1 << 30, 40), F32, b"")
    small = FakeTensor("small.weight", (8,), F32, b"", offset=40 << 32)
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes([], [big, small]))
    os.truncate(path, path.stat().st_size + (40 << 32) + 32)
    header = read_gguf_header(path)
    assert header.tensors[1].offset == header.data_offset + (40 << 32)
    assert header.tensors[0].n_bytes == 40 << 32


def test_a_vocabulary_of_129280_strings_costs_a_window_and_stays_in_the_file(tmp_path):
    tokens = [f"token number {i} of many" for i in range(129_280)]
    metadata = {
        "tokenizer.ggml.tokens": Typed("array:string", tokens),
        "tokenizer.ggml.token_type": Typed("array:i32", [1] * len(tokens)),
        "z.last": Typed("u32", 5),
    }
    path = write_gguf(tmp_path / "x.gguf", metadata, TENSORS)
    tracemalloc.start()
    header = read_gguf_header(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * WINDOW_BYTES
    assert header.metadata["z.last"] == 5
    assert list(array_of(header, "tokenizer.ggml.tokens").strings()) == tokens


def test_arrays_refuse_the_wrong_kind_and_a_file_that_changed(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", METADATA, TENSORS)
    header = read_gguf_header(path)
    strings, floats, integers = (
        array_of(header, f"a.{k}") for k in ("strings", "floats", "integers")
    )
    with pytest.raises(ShardError, match=r"a\.strings holds strings"):
        strings.numbers()
    with pytest.raises(ShardError, match=r"a\.floats holds f32"):
        floats.integers()
    with pytest.raises(ShardError, match=r"a\.integers holds i64"):
        list(integers.strings())
    os.truncate(path, strings.offset + 9)
    with pytest.raises(ShardError, match="changed"):
        list(strings.strings())
    path.unlink()
    with pytest.raises(ShardError, match="cannot be read"):
        integers.numbers()


def test_a_string_that_is_no_utf8_is_shown_in_a_value_and_refused_in_a_list(tmp_path):
    metadata = [
        ("general.name", Typed("string", b"\xff\xfe")),
        ("l", Typed("array:string", [b"\xff"])),
    ]
    header = read(tmp_path, gguf_bytes(metadata, []))
    assert header.metadata["general.name"] == "\ufffd\ufffd"
    with pytest.raises(ShardError, match="invalid UTF-8 in string 0"):
        list(array_of(header, "l").strings())


def head(n_tensors: int, n_metadata: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_metadata)


def pair(key: str | bytes, rest: bytes) -> bytes:
    return head(0, 1) + string(key) + rest


U32 = struct.Struct("<I").pack
U64 = struct.Struct("<Q").pack


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "magic wants 4 more bytes, 0 are left"),
        (b"GGU", "magic wants 4"),
        (b"GGML" + bytes(20), "no GGUF file"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (head(0, 0, version=1), "version 1, wanted 2 or 3"),
        (head(0, 0, version=4), "version 4, wanted 2 or 3"),
        (head(0, 0)[:-1], "number of metadata keys wants 8"),
        (head(1 << 40, 0), f"says {1 << 40} tensors"),
        (head(0, (1 << 64) - 1), f"says {(1 << 64) - 1} metadata keys"),
        (pair(b"", U32(4) + U32(1)), "metadata key is ''"),
        (pair(b"a\nb", U32(4) + U32(1)), "printable"),
        (pair(b"\xff", U32(4) + U32(1)), "invalid UTF-8"),
        (head(0, 1) + U64(1 << 60) + bytes(9), f"has {1 << 60} bytes, wanted at most 65535"),
        (head(0, 1) + U64(60) + bytes(9), "wants 60 more bytes, 9 are left"),
        (pair("k", U32(13) + bytes(8)), "k has the unknown value type 13"),
        (pair("k", U32(7) + b"\x02"), "k is a bool of 2"),
        (pair("k", U32(8) + U64(1 << 24)), "k wants 16777216 more bytes"),
        (pair("k", U32(8) + U64(1 << 62)), "wanted at most 16777216"),
        (pair("k", U32(9) + U32(9) + U64(1) + bytes(50)), "k is an array of array"),
        (pair("k", U32(9) + U32(77) + U64(1) + bytes(50)), "k is an array of 77"),
        (pair("k", U32(9) + U32(4) + U64(1 << 63) + bytes(50)), "k wants"),
        (pair("k", U32(9) + U32(8) + U64(1 << 63) + bytes(50)), "k says 9223372036854775808 str"),
        (pair("k", U32(9) + U32(8) + U64(2) + U64(1) + b"a" + U64(99) + b"b"), "k wants 99 more"),
        (pair("general.alignment", U32(4) + U32(0)), r"alignment is 0, wanted a power of two"),
        (pair("general.alignment", U32(4) + U32(48)), "alignment is 48"),
        (pair("general.alignment", U32(10) + U64(1 << 40)), "wanted a power of two"),
        (pair("general.alignment", U32(7) + b"\x01"), "alignment is True"),
        (pair("general.alignment", U32(8) + string("32")), "alignment is '32'"),
        (head(0, 2) + (string("k") + U32(0) + b"\x01") * 2 + bytes(9), "'k' stands twice"),
    ],
)
def test_a_damaged_head_is_refused_by_name(tmp_path, data, says):
    message = refused(tmp_path, data)
    assert says.replace("\\", "") in message


def tensors_file(*tensors: FakeTensor) -> bytes:
    return gguf_bytes([], tensors) + bytes(64)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ([FakeTensor("", (1,), F32, bytes(4))], "tensor name is ''"),
        ([FakeTensor("n" * 256, (1,), F32, bytes(4))], "has 256 bytes, wanted at most 255"),
        ([FakeTensor("n", (), F32, bytes(4))], "'n' has 0 dimensions"),
        ([FakeTensor("n", (1,) * 5, F32, bytes(4))], "'n' has 5 dimensions"),
        ([FakeTensor("n", (4, 0), F32, b"")], "'n' has the dims [4, 0]"),
        ([FakeTensor("n", (1 << 40, 1 << 40), F32, b"")], "'n' has the dims"),
        ([FakeTensor("n", (4,), 4, b"")], "'n' has the unknown type 4"),
        ([FakeTensor("n", (33,), Q8_0, bytes(34))], "rows of 33 values, wanted a multiple of 32"),
        ([FakeTensor("n", (128, 2), Q2_K, bytes(84))], "wanted a multiple of 256 for Q2_K"),
        ([FakeTensor("n", (4,), F32, bytes(16), offset=8)], "starts at 8, wanted a multiple of 32"),
        ([FakeTensor("n", (4000,), F32, bytes(16))], "'n' ends at"),
        ([FakeTensor("n", (4,), F32, b"", offset=1 << 62)], "'n' ends at"),
        ([FakeTensor("n", (4,), F32, b"", offset=(1 << 64) - 32)], "'n' ends at"),
        ([FakeTensor("n", (1,), F32, bytes(4))] * 2, "'n' stands twice"),
        (
            [FakeTensor("n", (9,), F32, bytes(36)), FakeTensor("m", (1,), F32, bytes(4), 32)],
            "inside tensor 'm'",
        ),
        (
            [FakeTensor("n", (9,), F32, bytes(36)), FakeTensor("m", (1,), F32, bytes(4), 0)],
            "inside tensor",
        ),
    ],
)
def test_a_lying_tensor_is_refused_by_name(tmp_path, tensors, says):
    assert says in refused(tmp_path, tensors_file(*tensors))


def test_what_is_no_regular_file_is_refused(tmp_path):
    with pytest.raises(ShardError, match="is missing"):
        read_gguf_header(tmp_path / "none.gguf")
    with pytest.raises(ShardError, match="not a regular file"):
        read_gguf_header(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ShardError, match="not a regular file"):
        read_gguf_header(tmp_path / "pipe.gguf")
    with pytest.raises(ShardError, match="cannot be opened"):
        read_gguf_header(tmp_path / "nul\0.gguf")


def test_a_header_beyond_the_limit_is_refused(tmp_path, monkeypatch):
    data = gguf_bytes([("k", Typed("array:u32", [1] * 100))], TENSORS)
    read(tmp_path, data)
    monkeypatch.setattr(gguf_header, "HEADER_BYTES_MAX", 300)
    assert "wants" in refused(tmp_path, data)


def test_no_file_stays_open(tmp_path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    data = gguf_bytes(METADATA.items(), TENSORS)
    header = read(tmp_path, data)
    list(array_of(header, "a.strings").strings())
    refused(tmp_path, data[:100])
    assert len(list(Path("/proc/self/fd").iterdir())) == before
