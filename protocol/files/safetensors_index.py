"""What the safetensors files of a model directory hold, by their headers alone.

Nothing in a header is believed: its length is compared with the file before it is read, and every
tensor's range with its dtype and shape, with its neighbours and with the file's size. As in the
safetensors library, a file with a hole between two tensors or with bytes after the last one is
refused: bytes that no tensor owns mean that header and data do not belong together. No file stays
open, and nothing behind a header is read.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import NoReturn

from protocol.errors import ShardError

from .safetensors_header import (
    HEADER_BYTES_MAX,
    LENGTH_BYTES,
    Shard,
    ShardFileError,
    TensorEntry,
    dtype_bytes,
    parse_header,
)
from .strict_json import JsonError, parse_strict, read_bounded
from .tensor_table import ExpectedTensor, expert_key, tensor_label

__all__ = ["SafetensorsIndex", "Shard", "TensorEntry", "dtype_bytes", "load_index", "read_header"]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
INDEX_BYTES_MAX = 100_000_000


@dataclass(frozen=True, slots=True)
class SafetensorsIndex:
    """All shards of a directory, ascending by name, and all their tensors by name."""

    shards: tuple[Shard, ...]
    tensors: dict[str, TensorEntry]  # in the order of shard, then offset


def read_header(path: Path) -> tuple[Shard, list[TensorEntry]]:
    """Return one file and its tensors, ascending by offset; raises ShardError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise ShardFileError(f"{path}: the shard is missing") from None
    except (OSError, ValueError) as error:
        raise ShardFileError(f"{path}: cannot be opened: {error}") from None
    try:
        status = os.fstat(descriptor)
        if not S_ISREG(status.st_mode):
            raise ShardFileError(f"{path}: is not a regular file")
        shard = Shard(path, status.st_size)
        return shard, parse_header(_header_bytes(descriptor, shard), shard)
    except OSError as error:
        raise ShardFileError(f"{path}: its header cannot be read: {error}") from None
    finally:
        os.close(descriptor)


def load_index(
    directory: Path, expected: Mapping[str, ExpectedTensor] | None = None
) -> SafetensorsIndex:
    """Return what the shards of a model directory hold.

    The index names the shards; without one, `model.safetensors` alone is the model. Raises
    ShardError where files are missing or damaged, where a tensor stands twice, where index and
    shards differ, or, before a shard is opened, where the index lacks an `expected` tensor.
    """
    weight_map, total = _read_weight_map(directory)
    if weight_map is None:
        if not (directory / SINGLE_NAME).exists():
            raise ShardError(f"{directory}: holds neither {INDEX_NAME} nor {SINGLE_NAME}")
        shard, entries = read_header(directory / SINGLE_NAME)
        return SafetensorsIndex((shard,), {entry.name: entry for entry in entries})
    for name, wanted in (expected or {}).items():
        if name not in weight_map:
            raise ShardError(
                f"{directory / INDEX_NAME}: {tensor_label(name)} is in no shard, "
                f"wanted {wanted.dtype} {list(wanted.shape)}"
            )
    placed: dict[str, list[str]] = defaultdict(list)
    for name, file_name in weight_map.items():
        placed[file_name].append(name)
    shards: list[Shard] = []
    tensors: dict[str, TensorEntry] = {}
    found: dict[str, str] = {}  # tensor name -> the file that holds it
    for file_name in sorted(placed):
        shard, entries = _read_placed(directory / file_name, placed[file_name])
        shards.append(shard)
        own = {entry.name: entry for entry in entries}
        for name in own.keys() & tensors.keys():
            raise ShardError(
                f"{tensor_label(name)} stands twice: in {tensors[name].shard.path} and in "
                f"{shard.path}"
            )
        tensors |= own
        found |= dict.fromkeys(own, file_name)
    _compare(directory / INDEX_NAME, weight_map, total, tensors, found)
    return SafetensorsIndex(tuple(shards), tensors)


def _header_bytes(descriptor: int, shard: Shard) -> bytes:
    """Return the JSON part of a header, after its length has been compared with the file."""
    n_header = int.from_bytes(_read_exactly(descriptor, 0, LENGTH_BYTES, shard), "little")
    says = f"{shard.path}: says that its header has {n_header} bytes"
    if n_header > HEADER_BYTES_MAX:
        raise ShardFileError(f"{says}, wanted at most {HEADER_BYTES_MAX}")
    if n_header > shard.n_bytes - LENGTH_BYTES:
        raise ShardFileError(f"{says}, the file has {shard.n_bytes} in all")
    return _read_exactly(descriptor, LENGTH_BYTES, n_header, shard)


def _read_exactly(descriptor: int, offset: int, n_bytes: int, shard: Shard) -> bytes:
    parts: list[bytes] = []
    end = offset + n_bytes
    while offset < end:
        part = os.pread(descriptor, end - offset, offset)
        if not part:
            raise ShardFileError(f"{shard.path}: ends at byte {offset}, inside its header")
        parts.append(part)
        offset += len(part)
    return b"".join(parts)


def _read_placed(path: Path, names: list[str]) -> tuple[Shard, list[TensorEntry]]:
    """Read one shard; an error that concerns the whole file says what the index places in it."""
    try:
        return read_header(path)
    except ShardFileError as error:
        expert = min((key for key in map(expert_key, names) if key), default=None)
        among = f", among them layer {expert[0]} expert {expert[1]}" if expert else ""
        raise ShardError(
            f"{error} ({INDEX_NAME} places {len(names)} tensors in it{among})"
        ) from None


def _read_weight_map(directory: Path) -> tuple[dict[str, str] | None, int | None]:
    """Return tensor name -> file name and metadata.total_size; (None, None) without an index."""
    path = directory / INDEX_NAME
    try:
        with path.open("rb") as file:
            data = read_bounded(file, INDEX_BYTES_MAX)
    except FileNotFoundError:
        return None, None
    except OSError as error:
        raise ShardError(f"{path}: cannot be read: {error}") from None
    if len(data) > INDEX_BYTES_MAX:
        raise ShardError(f"{path}: is larger than {INDEX_BYTES_MAX} bytes")
    try:
        raw = parse_strict(data)
    except JsonError as error:
        raise ShardError(f"{path}: {error}") from None
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ShardError(f"{path}: has no weight_map from tensor names to shards")
    plain: set[str] = set()
    for name, file_name in weight_map.items():
        if not (isinstance(file_name, str) and file_name in plain):
            if _is_plain_file_name(file_name):
                plain.add(file_name)
                continue
            raise ShardError(
                f"{path}: {tensor_label(name)} is placed in {ascii(file_name)[:120]}, wanted the "
                "name of a .safetensors file beside the index"
            )
    metadata = raw.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is not None and type(total) is not int:
        raise ShardError(f"{path}: total_size is {ascii(total)[:60]}, wanted a number of bytes")
    return weight_map, total


def _is_plain_file_name(name: object) -> bool:
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and not name.startswith(".")
        and "/" not in name
        and name.isprintable()
    )


def _compare(
    path: Path,
    weight_map: dict[str, str],
    total: int | None,
    tensors: dict[str, TensorEntry],
    found: dict[str, str],
) -> None:
    """Refuse an index that differs from the shards' headers in any tensor or in the total."""
    if weight_map != found:
        _refuse_difference(path, weight_map, tensors, found)
    n_bytes = sum(entry.n_bytes for entry in tensors.values())
    if total is not None and total != n_bytes:
        raise ShardError(f"{path}: total_size is {total}, the shards hold {n_bytes} bytes of data")


def _refuse_difference(
    path: Path,
    weight_map: dict[str, str],
    tensors: dict[str, TensorEntry],
    found: dict[str, str],
) -> NoReturn:
    for name, file_name in weight_map.items():
        if found.get(name) != file_name:
            where = f"{found[name]} holds it" if name in found else "no shard holds it"
            raise ShardError(f"{path}: places {tensor_label(name)} in {file_name}, but {where}")
    name = next(name for name in tensors if name not in weight_map)
    raise ShardError(
        f"{tensors[name].shard.path}: {tensor_label(name)} is in the shard, but not in {path.name}"
    )
