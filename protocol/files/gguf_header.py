"""One GGUF file by its header alone: metadata, tensors, every range checked.

Nothing in a header is believed: counts and lengths are compared with what is left of the file (and
with limits that no real model comes near), tensor ranges with the file's size and with each other.
No file stays open; of the data at most one window is read. Versions 2 and 3, little endian.

| part | content |
| --- | --- |
| head | "GGUF", version u32, n_tensors u64, n_metadata u64 |
| metadata | key string, value type u32, value; a string is a u64 length and its bytes |
| tensors | name string, n_dims u32, dims u64 (innermost first), type u32, offset u64 |
| data | from the next multiple of `general.alignment` (32); offsets count from here |

Source: the GGUF specification.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

from protocol.errors import ShardError

from .block_sizes import BLOCK_TYPE_OF_ID, BlockType
from .gguf_cursor import Cursor
from .gguf_values import Value, read_value
from .safetensors_header import Shard

MAGIC = b"GGUF"
VERSIONS = (2, 3)
HEADER_BYTES_MAX = 100_000_000
METADATA_MAX = 1 << 16
TENSORS_MAX = 1 << 16
KEY_BYTES_MAX = 65_535
NAME_BYTES_MAX = 255
DIMENSIONS_MAX = 4
ALIGNMENT_KEY = "general.alignment"
ALIGNMENT_DEFAULT = 32
ALIGNMENT_MAX = 1 << 20
SIZE_MAX = (1 << 63) - 1


class GgufTensor(NamedTuple):
    """One tensor of a GGUF file; `offset` counts from the start of the file."""

    name: str
    dims: tuple[int, ...]  # innermost first, as in the file
    block: BlockType
    shard: Shard
    offset: int
    n_bytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The dims outermost first, as the rest of the program has them."""
        return self.dims[::-1]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the innermost dimension, always whole blocks."""
        return self.dims[0] // self.block.n_values * self.block.n_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What one file's header says, checked."""

    shard: Shard
    version: int
    alignment: int
    data_offset: int
    metadata: dict[str, Value]
    tensors: tuple[GgufTensor, ...]  # in the order of the file's list


def read_gguf_header(path: Path) -> GgufHeader:
    """Return one file's checked header; raises ShardError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise ShardError(f"{path}: the shard is missing") from None
    except (OSError, ValueError) as error:
        raise ShardError(f"{path}: cannot be opened: {error}") from None
    try:
        status = os.fstat(descriptor)
        if not S_ISREG(status.st_mode):
            raise ShardError(f"{path}: is not a regular file")
        shard = Shard(path, status.st_size)
        return _parse(Cursor(descriptor, path, min(status.st_size, HEADER_BYTES_MAX)), shard)
    except OSError as error:
        raise ShardError(f"{path}: its header cannot be read: {error}") from None
    finally:
        os.close(descriptor)


def _parse(cursor: Cursor, shard: Shard) -> GgufHeader:
    version = _read_version(cursor)
    n_tensors = _count(cursor, "tensors", TENSORS_MAX, 8 + 4 + 8 + 4 + 8)
    n_metadata = _count(cursor, "metadata keys", METADATA_MAX, 8 + 4 + 1)
    metadata: dict[str, Value] = {}
    for _ in range(n_metadata):
        key = _text(cursor, "a metadata key", KEY_BYTES_MAX)
        if key in metadata:
            raise cursor.refusal(f"metadata key {key!r} stands twice")
        metadata[key] = read_value(cursor, key)
    alignment = _alignment(cursor, metadata)
    described = [_read_tensor(cursor) for _ in range(n_tensors)]
    data_offset = -(-cursor.offset // alignment) * alignment
    tensors = tuple(
        _place(name, dims, block, offset, shard, data_offset, alignment)
        for name, dims, block, offset in described
    )
    _check_apart(tensors)
    return GgufHeader(shard, version, alignment, data_offset, metadata, tensors)


def _read_version(cursor: Cursor) -> int:
    magic = cursor.take(4, "the magic")
    if magic != MAGIC:
        raise ShardError(f"{cursor.path}: begins with {magic!r}, wanted {MAGIC!r}: is no GGUF file")
    version = cursor.u32("the version")
    if version & 0xFFFF == 0:
        raise ShardError(f"{cursor.path}: is a big-endian GGUF file, wanted a little-endian one")
    if version not in VERSIONS:
        raise ShardError(f"{cursor.path}: is of GGUF version {version}, wanted 2 or 3")
    return version


def _count(cursor: Cursor, what: str, most: int, least_bytes: int) -> int:
    count = cursor.u64(f"the number of {what}")
    most = min(most, cursor.left // least_bytes)
    if count > most:
        raise cursor.refusal(f"says {count} {what}, wanted at most {most}")
    return count


def _text(cursor: Cursor, what: str, most: int) -> str:
    data = cursor.counted(what, most)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise cursor.refusal(f"{what} is invalid UTF-8") from None
    if not text or not text.isprintable():
        raise cursor.refusal(f"{what} is {ascii(text)[:80]}, wanted printable characters")
    return text


def _alignment(cursor: Cursor, metadata: dict[str, Value]) -> int:
    found = metadata.get(ALIGNMENT_KEY, ALIGNMENT_DEFAULT)
    is_power = type(found) is int and 0 < found <= ALIGNMENT_MAX and found & (found - 1) == 0
    if not is_power or not isinstance(found, int):
        raise cursor.refusal(
            f"{ALIGNMENT_KEY} is {ascii(found)[:80]}, wanted a power of two up to {ALIGNMENT_MAX}"
        )
    return found


def _read_tensor(cursor: Cursor) -> tuple[str, tuple[int, ...], BlockType, int]:
    name = _text(cursor, "a tensor name", NAME_BYTES_MAX)
    n_dims = cursor.u32(f"tensor {name!r}")
    if not 1 <= n_dims <= DIMENSIONS_MAX:
        raise cursor.refusal(
            f"tensor {name!r} has {n_dims} dimensions, wanted 1 to {DIMENSIONS_MAX}"
        )
    dims = tuple(cursor.u64(f"tensor {name!r}") for _ in range(n_dims))
    type_id = cursor.u32(f"tensor {name!r}")
    block = BLOCK_TYPE_OF_ID.get(type_id)
    if block is None:
        raise cursor.refusal(f"tensor {name!r} has the unknown type {type_id}")
    if 0 in dims or prod(dims) > SIZE_MAX:
        raise cursor.refusal(f"tensor {name!r} has the dims {list(dims)}")
    if dims[0] % block.n_values:
        raise cursor.refusal(
            f"tensor {name!r} has rows of {dims[0]} values, wanted a multiple of {block.n_values} "
            f"for {block.name}"
        )
    return name, dims, block, cursor.u64(f"tensor {name!r}")


def _place(
    name: str,
    dims: tuple[int, ...],
    block: BlockType,
    offset: int,
    shard: Shard,
    data_offset: int,
    alignment: int,
) -> GgufTensor:
    n_bytes = prod(dims) // block.n_values * block.n_bytes
    start = data_offset + offset
    where = f"{shard.path}: tensor {name!r}"
    if offset % alignment:
        raise ShardError(f"{where} starts at {offset}, wanted a multiple of {alignment}")
    if start + n_bytes > shard.n_bytes:
        raise ShardError(f"{where} ends at {start + n_bytes}, the file has {shard.n_bytes} bytes")
    return GgufTensor(name, dims, block, shard, start, n_bytes)


def _check_apart(tensors: tuple[GgufTensor, ...]) -> None:
    """Refuse two tensors of one name, and tensors that share a byte."""
    names: set[str] = set()
    for tensor in tensors:
        if tensor.name in names:
            raise ShardError(f"{tensor.shard.path}: tensor {tensor.name!r} stands twice")
        names.add(tensor.name)
    for left, right in pairwise(sorted(tensors, key=lambda tensor: tensor.offset)):
        if left.offset + left.n_bytes > right.offset:
            raise ShardError(
                f"{left.shard.path}: tensor {left.name!r} ends at {left.offset + left.n_bytes}, "
                f"inside tensor {right.name!r}, which starts at {right.offset}"
            )
