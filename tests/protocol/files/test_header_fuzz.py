"""Property tests of the safetensors header reader: damaged in, ShardError or safe ranges out."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.errors import ShardError
from protocol.files.safetensors_header import (
    LENGTH_BYTES,
    Shard,
    TensorEntry,
    dtype_bytes,
    parse_header,
)
from protocol.files.safetensors_index import read_header
from protocol.files.strict_json import JsonError, parse_strict

GOOD: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "norm.weight": {"dtype": "BF16", "shape": [8], "data_offsets": [0, 16]},
    "layers.1.ffn.experts.3.w2.scale": {
        "dtype": "F8_E8M0",
        "shape": [8, 1],
        "data_offsets": [16, 24],
    },
    "layers.1.ffn.experts.3.w2.weight": {
        "dtype": "I8",
        "shape": [8, 16],
        "data_offsets": [24, 152],
    },
}
GOOD_BYTES = json.dumps(GOOD).encode()
DATA_BYTES = 152

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-2, 200)
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["BF16", "F32", "I8", "F4", "F8_E8M0", [0, 16], [24, 152], [8, 16], []])
)
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), inner)
    ),
    max_leaves=8,
)


def _must_be_safe(entries: list[TensorEntry], n_bytes: int, start: int) -> None:
    end = start
    for entry in entries:
        assert entry.offset == end
        assert entry.n_bytes == dtype_bytes(entry.dtype, entry.shape)
        end = entry.offset + entry.n_bytes
    assert end == n_bytes


def _must_name(where: str, error: ShardError) -> None:
    assert str(error).startswith(where)
    assert str(error).encode()  # no lone surrogate may reach a terminal


def _try(data: bytes, n_bytes: int) -> None:
    try:
        entries = parse_header(data, Shard(Path("x.safetensors"), n_bytes))
    except ShardError as error:
        _must_name("x.safetensors: ", error)
        return
    _must_be_safe(entries, n_bytes, LENGTH_BYTES + len(data))


def test_the_good_header_is_accepted() -> None:
    n_bytes = LENGTH_BYTES + len(GOOD_BYTES) + DATA_BYTES
    assert len(parse_header(GOOD_BYTES, Shard(Path("x"), n_bytes))) == 3


@settings(max_examples=400)
@given(
    name=st.sampled_from(list(GOOD)),
    field=st.sampled_from(["dtype", "shape", "data_offsets", ""]),
    value=JSON,
    extra=st.integers(-40, 40),
)
def test_any_value_in_any_field_is_refused_or_safe(
    name: str, field: str, value: object, extra: int
) -> None:
    header = json.loads(GOOD_BYTES)
    if field:
        header[name][field] = value
    else:
        header[name] = value
    data = json.dumps(header).encode()
    _try(data, LENGTH_BYTES + len(data) + DATA_BYTES + extra)
    _try(data, LENGTH_BYTES + len(data) + DATA_BYTES)


PAIRS = st.lists(
    st.tuples(st.sampled_from(["dtype", "shape", "data_offsets", "x", "a\\"]), LEAVES), max_size=5
)


def as_text(pairs: list[tuple[str, Any]]) -> str:
    """A JSON object with the keys as they come, twice where they come twice."""
    texts = [f"{json.dumps(key)}:{value}" for key, value in pairs]
    return "{" + ",".join(texts) + "}"


@settings(max_examples=600)
@given(
    tensors=st.lists(
        st.tuples(st.sampled_from(["a", "b", "__metadata__"]), PAIRS | st.just("good")), max_size=4
    ),
)
def test_no_key_that_stands_twice_gets_past_the_count_of_strings(tensors: list[Any]) -> None:
    good = '{"dtype":"I8","shape":[],"data_offsets":[0,1]}'
    values = [
        (name, good if pairs == "good" else as_text([(k, json.dumps(v)) for k, v in pairs]))
        for name, pairs in tensors
    ]
    data = as_text(values).encode()
    try:
        parse_strict(data)
    except JsonError:
        with pytest.raises(ShardError):
            parse_header(data, Shard(Path("x"), LENGTH_BYTES + len(data) + 1))


@pytest.mark.parametrize(
    "text",
    [
        '{"a":{"dtype":"I8","dtype":"I8","shape":[],"data_offsets":[0,1]}}',
        '{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"a":{}}',
        '{"a":{"dtype":"I8","d\\u0074ype":"I8","shape":[],"data_offsets":[0,1]}}',
        '{"__metadata__":{"x":"1"},"__metadata__":{"x":"1"}}',
    ],
)
def test_a_key_that_stands_twice_is_refused(text: str) -> None:
    data = text.encode()
    with pytest.raises(ShardError, match="stands twice in one JSON object"):
        parse_header(data, Shard(Path("x"), LENGTH_BYTES + len(data) + 1))


@settings(max_examples=400)
@given(
    edits=st.lists(st.tuples(st.integers(0, len(GOOD_BYTES)), st.binary(max_size=3)), max_size=4),
    cut=st.integers(0, 3),
)
def test_mutated_bytes_are_refused_or_safe(edits: list[tuple[int, bytes]], cut: int) -> None:
    data = GOOD_BYTES
    for position, new in edits:
        data = data[:position] + new + data[position + cut :]
    _try(data, LENGTH_BYTES + len(data) + DATA_BYTES)


@settings(max_examples=200)
@given(data=st.binary(max_size=64).map(lambda tail: b"{" + tail), n_bytes=st.integers(0, 1 << 64))
def test_random_bytes_are_refused_or_safe(data: bytes, n_bytes: int) -> None:
    _try(data, n_bytes)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    length=st.integers(0, 1 << 64).map(lambda n: min(n, (1 << 64) - 1)) | st.integers(0, 800),
    cut=st.integers(0, 700),
)
def test_a_lying_length_neither_crashes_nor_allocates_nor_reads_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, cut: int
) -> None:
    path = tmp_path / "x.safetensors"
    content = length.to_bytes(8, "little") + GOOD_BYTES + bytes(DATA_BYTES)
    path.write_bytes(content[: len(content) - min(cut, len(content))])
    ranges: list[tuple[int, int]] = []
    real_pread = os.pread

    def watched_pread(descriptor: int, n_bytes: int, offset: int) -> bytes:
        ranges.append((offset, offset + n_bytes))
        return real_pread(descriptor, n_bytes, offset)

    tracemalloc.start()
    with monkeypatch.context() as patch:
        patch.setattr("protocol.files.safetensors_index.os.pread", watched_pread)
        try:
            shard, entries = read_header(path)
        except ShardError as error:
            _must_name(f"{path}: ", error)
        else:
            _must_be_safe(entries, shard.n_bytes, entries[0].offset)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
    assert all(end <= max(LENGTH_BYTES, path.stat().st_size) for _, end in ranges)
    assert all(end <= LENGTH_BYTES + length for _, end in ranges)


def test_a_header_beyond_the_limit_is_never_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes((1 << 40).to_bytes(8, "little"))
    os.truncate(path, (1 << 40) + 8)  # sparse: the length alone would pass
    tracemalloc.start()
    with pytest.raises(ShardError, match="wanted at most 100000000"):
        read_header(path)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
