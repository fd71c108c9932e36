"""One safetensors header: parsed, and every range checked. Pure: bytes in, entries out.

Source: the safetensors format (8 bytes little-endian header length, JSON, data without holes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from protocol.errors import ShardError

from .strict_json import JsonError, parse_strict
from .tensor_table import expert_key, tensor_label

HEADER_BYTES_MAX = 100_000_000  # the safetensors library's own limit
LENGTH_BYTES = 8
DIMENSIONS_MAX = 16
SIZE_MAX = (1 << 63) - 1
METADATA_KEY = "__metadata__"
_N_KEYS = 3  # dtype, shape, data_offsets
_INT = {int}
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


class ShardFileError(ShardError):
    """The file as a whole is unusable, so that the error can name no tensor."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One weight file."""

    path: Path
    n_bytes: int

    @property
    def name(self) -> str:
        """The file's name without its directory."""
        return self.path.name


class TensorEntry(NamedTuple):
    """One tensor of a shard; `offset` counts from the start of the file."""

    name: str
    dtype: str  # as in the header: BF16, F32, F8_E4M3, F8_E8M0, I8
    shape: tuple[int, ...]
    shard: Shard
    offset: int
    n_bytes: int


def dtype_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor of a known dtype; ValueError where it ends inside a byte."""
    n_bits = math.prod(shape) * DTYPE_BITS[dtype]
    if n_bits % 8:
        raise ValueError(f"{dtype} {list(shape)} ends inside a byte")
    return n_bits // 8


def parse_header(data: bytes, shard: Shard) -> list[TensorEntry]:
    """Return the tensors of a header, ascending by offset; raises ShardError.

    `data` is the JSON part alone; the tensors' data begin right after it and end with the file.
    """
    if not data.startswith(b"{"):
        raise ShardFileError(f"{shard.path}: its header does not begin with '{{'")
    try:
        header = _parsed(data)
    except JsonError as error:
        raise ShardFileError(f"{shard.path}: its header is damaged: {error}") from None
    _check_metadata(header.pop(METADATA_KEY, {}), shard)
    start = LENGTH_BYTES + len(data)
    known: dict[tuple[str, tuple[int, ...]], int] = {}
    entries = [
        _known_entry(name, raw, shard, start, known) or _entry(name, raw, shard, start, known)
        for name, raw in header.items()
    ]
    entries.sort(key=lambda entry: (entry.offset, entry.n_bytes, entry.name))
    _check_ends(entries, shard)
    _check_neighbours(entries, shard, start)
    return entries


def _check_metadata(metadata: object, shard: Shard) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ShardFileError(f"{shard.path}: {METADATA_KEY} is not a JSON object of texts")


def _parsed(data: bytes) -> Any:
    """Return a header's JSON without duplicate keys; raises JsonError.

    A released checkpoint has 90,000 objects in its headers, and to look at each one's keys takes as
    long as to parse them. Instead strings are counted: where no quote is escaped, the text has two
    quotes a string, and a key that stood twice took strings with it that are missing now.
    """
    if b"\\" not in data:
        header = parse_strict(data, look_for_duplicates=False)
        if 2 * _count_strings(header) == data.count(b'"'):
            return header
    return parse_strict(data)


def _count_strings(header: Any) -> int:
    """Count keys and string values of a sound header, -1 where it is none."""
    metadata = header.get(METADATA_KEY, {})
    n_tensors = len(header) - (METADATA_KEY in header)
    if not isinstance(metadata, dict) or not all(type(text) is str for text in metadata.values()):
        return -1
    # A tensor has its name, three keys and the dtype.
    return 5 * n_tensors + 2 * len(metadata) + (METADATA_KEY in header)


def _known_entry(
    name: str, raw: Any, shard: Shard, start: int, known: dict[tuple[str, tuple[int, ...]], int]
) -> TensorEntry | None:
    """Return a sound tensor of a dtype and shape that were sound before; None leads to the checks.

    True and 1.0 are no sizes, though they equal 1.
    """
    try:
        dtype, shape = raw["dtype"], raw["shape"]
        begin, end = raw["data_offsets"]
        if type(shape) is not list or {type(begin), type(end), *map(type, shape)} != _INT:
            return None
        sizes = tuple(shape)
        n_bytes = known[dtype, sizes]
    except (KeyError, TypeError, ValueError):
        return None
    if end - begin != n_bytes or not 0 <= begin <= end <= SIZE_MAX or len(raw) != _N_KEYS:
        return None
    return TensorEntry(name, dtype, sizes, shard, start + begin, n_bytes)


def _entry(
    name: str, raw: Any, shard: Shard, start: int, known: dict[tuple[str, tuple[int, ...]], int]
) -> TensorEntry:
    dtype, shape, n_bytes = _kind(name, raw, shard)
    begin, end = _offsets(name, raw, shard)
    if end - begin != n_bytes:
        raise _refusal(
            shard,
            name,
            f"data_offsets {begin} to {end} hold {end - begin} bytes, {dtype} {list(shape)} "
            f"wants {n_bytes}",
        )
    known[dtype, shape] = n_bytes
    return TensorEntry(name, dtype, shape, shard, start + begin, n_bytes)


def _kind(name: str, raw: Any, shard: Shard) -> tuple[str, tuple[int, ...], int]:
    if not isinstance(raw, dict) or not {"dtype", "shape", "data_offsets"} <= raw.keys():
        raise _refusal(shard, name, "is no JSON object of dtype, shape and data_offsets")
    dtype, shape = raw["dtype"], raw["shape"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _refusal(shard, name, f"its dtype is {ascii(dtype)[:60]}, which is none we know")
    if (
        not isinstance(shape, list)
        or len(shape) > DIMENSIONS_MAX
        or not all(type(size) is int and 0 <= size <= SIZE_MAX for size in shape)
    ):
        raise _refusal(
            shard, name, f"its shape is {ascii(shape)[:60]}, wanted a list of up to 16 sizes"
        )
    try:
        return dtype, tuple(shape), dtype_bytes(dtype, tuple(shape))
    except ValueError as error:
        raise _refusal(shard, name, str(error)) from None


def _offsets(name: str, raw: dict[str, Any], shard: Shard) -> tuple[int, int]:
    offsets = raw.get("data_offsets")
    if (
        type(offsets) is not list
        or len(offsets) != 2
        or type(offsets[0]) is not int
        or type(offsets[1]) is not int
        or not 0 <= offsets[0] <= offsets[1] <= SIZE_MAX
    ):
        raise _refusal(
            shard, name, f"data_offsets are {ascii(offsets)[:60]}, wanted two ascending offsets"
        )
    return offsets[0], offsets[1]


def _check_ends(entries: list[TensorEntry], shard: Shard) -> None:
    """Refuse a truncated file; a routed expert among the lost tensors is named first."""
    lost = [entry for entry in entries if entry.offset + entry.n_bytes > shard.n_bytes]
    if not lost:
        return
    first = next((entry for entry in lost if expert_key(entry.name)), lost[0])
    more = f" ({len(lost)} tensors end beyond the file)" if len(lost) > 1 else ""
    raise _refusal(
        shard,
        first.name,
        f"ends at byte {first.offset + first.n_bytes}, the file has {shard.n_bytes}: "
        f"it is truncated or its header lies{more}",
    )


def _check_neighbours(entries: list[TensorEntry], shard: Shard, start: int) -> None:
    """Refuse an overlap, a hole, and bytes after the last tensor."""
    end = start
    before: TensorEntry | None = None
    for entry in entries:
        if entry.offset < end and before is not None:
            raise _refusal(
                shard,
                entry.name,
                f"begins at byte {entry.offset}, inside {tensor_label(before.name)}, "
                f"which ends at {end}",
            )
        if entry.offset > end:
            raise _refusal(
                shard,
                entry.name,
                f"begins at byte {entry.offset}, wanted {end}: no tensor owns the bytes between",
            )
        end = entry.offset + entry.n_bytes
        before = entry
    if end != shard.n_bytes:
        raise ShardFileError(
            f"{shard.path}: the last tensor ends at byte {end}, the file has {shard.n_bytes}"
        )


def _refusal(shard: Shard, name: str, problem: str) -> ShardError:
    return ShardError(f"{shard.path}: {tensor_label(name)}: {problem}")
