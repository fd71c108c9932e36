"""A pack directory, opened and checked: manifest, dense and Engram files, record files, mirror.

No file stays open, and behind headers and indices nothing is read: `headrace verify` does that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

import xxhash

from protocol.errors import ShardError

from .model_config import ModelConfig
from .pack_format import (
    HEADER_BYTES,
    PackHeader,
    check_index,
    decode_header,
    decode_index,
    root_hash,
)
from .pack_manifest import MANIFEST_NAME, MIRROR, Manifest, PackFile, read_manifest
from .record_map import RecordFile, RecordMap
from .safetensors_header import LENGTH_BYTES, Shard, TensorEntry
from .safetensors_index import read_header
from .slice_map import FP4, ExpertLayout
from .tensor_check import check_tensors
from .tensor_table import (
    ExpectedTensor,
    dense_tensors,
    engram_rows_name,
    engram_tensors,
    expert_pieces,
    is_engram_table,
    tensor_label,
)


@dataclass(frozen=True, slots=True)
class PackContents:
    """What a pack directory holds."""

    manifest: Manifest
    shards: tuple[Shard, ...]
    tensors: dict[str, TensorEntry]  # dense ones and Engram tables
    slice_map: RecordMap
    fingerprint: bytes
    warnings: tuple[str, ...]


def open_pack(
    directory: Path, config: ModelConfig, raw_config: Mapping[str, Any], *, incomplete: bool = False
) -> PackContents:
    """Open and check a pack; `incomplete` accepts a share of the layers. Raises ShardError."""
    manifest = read_manifest(directory)
    _check_layers(directory, manifest, config, incomplete=incomplete)
    shards, tensors = _plain_tensors(directory, manifest)
    check_tensors(directory, tensors, _expected(config, tensors))
    stripes = _stripe_files(directory, manifest, config)
    mirrors, warnings = _mirror_files(directory, manifest, config)
    layouts = _layouts(directory, config, stripes)
    slice_map = RecordMap(config, layouts, stripes, mirrors)
    return PackContents(
        manifest=manifest,
        shards=(*shards, *slice_map.shards),
        tensors=tensors,
        slice_map=slice_map,
        fingerprint=_fingerprint(raw_config, manifest),
        warnings=warnings,
    )


def read_record_file(path: Path, wanted: PackFile, manifest: Manifest) -> RecordFile:
    """Open one record file and check it against the manifest; raises ShardError naming it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise ShardError(f"{path}: {_role(wanted, manifest)} is missing") from None
    except OSError as error:
        raise ShardError(f"{path}: cannot be opened: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not S_ISREG(status.st_mode):
            raise ShardError(f"{path}: is not a regular file")
        page = _read(descriptor, path, 0, min(HEADER_BYTES, status.st_size))
        header = decode_header(path, page, status.st_size)
        _check_identity(path, header, wanted, manifest)
        index = _read(descriptor, path, header.index_offset, header.index_bytes)
    except OSError as error:
        raise ShardError(f"{path}: cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)
    check_index(path, page, index)
    if root_hash(page, index) != wanted.hash:
        raise ShardError(f"{path}: is another pack's, or another state of this one")
    checksums, parts = decode_index(header, index)
    return RecordFile(Shard(path, status.st_size), header, checksums, parts)


def header_hash(path: Path) -> str:
    """Return 16 hex digits of a safetensors file's header, its length included."""
    with path.open("rb") as file:
        start = file.read(LENGTH_BYTES)
        n_header = int.from_bytes(start, "little")
        n_file = os.fstat(file.fileno()).st_size
        header = start + file.read(min(n_header, max(0, n_file - LENGTH_BYTES)))
    return xxhash.xxh3_64_hexdigest(header)


def layer_ranges(layers: Iterable[int]) -> str:
    """Return layers for people: "3, 5-9"."""
    spans: list[list[int]] = []
    for layer in sorted(layers):
        if spans and spans[-1][1] == layer - 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _check_layers(
    directory: Path, manifest: Manifest, config: ModelConfig, *, incomplete: bool
) -> None:
    if manifest.n_layers != config.n_layers:
        raise ShardError(
            f"{directory / MANIFEST_NAME}: the pack has {manifest.n_layers} layers, "
            f"its config {config.n_layers}"
        )
    missing = manifest.missing_layers
    if missing and not incomplete:
        raise ShardError(
            f"{directory}: an incomplete pack, the experts of layers {layer_ranges(missing)} are "
            f"missing; headrace pack --layers adds them"
        )


def _plain_tensors(
    directory: Path, manifest: Manifest
) -> tuple[list[Shard], dict[str, TensorEntry]]:
    """Read the headers of dense and Engram files, and of linked shards, of whom tables count."""
    shards: list[Shard] = []
    tensors: dict[str, TensorEntry] = {}

    def add(path: Path, n_bytes: int, *, tables_only: bool) -> None:
        shard, entries = read_header(path)
        if shard.n_bytes != n_bytes:
            raise ShardError(f"{path}: has {shard.n_bytes} bytes, {MANIFEST_NAME} says {n_bytes}")
        shards.append(shard)
        for entry in entries:
            if tables_only and not is_engram_table(entry.name):
                continue
            other = tensors.setdefault(entry.name, entry)
            if other is not entry:
                raise ShardError(
                    f"{tensor_label(entry.name)} stands twice: in {other.shard.path} and in {path}"
                )

    for file in manifest.files:
        if file.kind in {"dense", "engram"}:
            path = manifest.directory(directory, file.place) / file.name
            add(path, file.n_bytes, tables_only=False)
    for link in manifest.links:
        path = directory / link.name
        add(path, link.n_bytes, tables_only=True)
        if header_hash(path) != link.header:
            raise ShardError(f"{path}: is linked, and its header is no longer the one packed")
    return shards, tensors


def _expected(config: ModelConfig, tensors: Mapping[str, TensorEntry]) -> dict[str, ExpectedTensor]:
    """Dense tensors, and each Engram table either as in the shards or as interleaved rows."""
    expected = dense_tensors(config) | engram_tensors(config)
    for layer, n_rows in zip(config.engram_layers, config.engram_n_rows, strict=True):
        rows = engram_rows_name(layer)
        if rows in tensors:
            for name in [name for name in expected if is_engram_table(name, layer)]:
                del expected[name]
            expected[rows] = ExpectedTensor("U8", (n_rows, config.engram_row_bytes), "engram")
    return expected


def _stripe_files(
    directory: Path, manifest: Manifest, config: ModelConfig
) -> list[list[RecordFile]]:
    n_stripes = max(1, len(manifest.stripes))
    found: list[dict[int, RecordFile]] = [{} for _ in range(config.n_layers)]
    for file in manifest.files:
        if file.kind != "experts" or file.place == MIRROR:
            continue
        path = manifest.directory(directory, file.place) / file.name
        record = read_record_file(path, file, manifest)
        _check_expert_count(path, record.header, config)
        stripe = record.header.stripe
        if stripe.n_stripes != n_stripes or stripe.number in found[file.layer]:
            raise ShardError(
                f"{path}: is stripe {stripe.number} of {stripe.n_stripes}, "
                f"the pack has {n_stripes}, each once"
            )
        found[file.layer][stripe.number] = record
    for layer in manifest.layers:
        lost = [number for number in range(n_stripes) if number not in found[layer]]
        if lost:
            raise ShardError(
                f"{directory / MANIFEST_NAME}: names no file for layer {layer} stripe {lost[0]}"
            )
    return [[files[number] for number in sorted(files)] for files in found]


def _mirror_files(
    directory: Path, manifest: Manifest, config: ModelConfig
) -> tuple[list[RecordFile | None], tuple[str, ...]]:
    """The mirror's files; one that cannot be used is left out, with a warning."""
    mirrors: list[RecordFile | None] = [None] * config.n_layers
    warnings: list[str] = []
    for file in manifest.files:
        if file.place != MIRROR:
            continue
        path = manifest.directory(directory, file.place) / file.name
        try:
            record = read_record_file(path, file, manifest)
            _check_expert_count(path, record.header, config)
        except ShardError as error:
            warnings.append(f"mirror not used for layer {file.layer}: {error}")
        else:
            mirrors[file.layer] = record
    return mirrors, tuple(warnings)


def _check_identity(path: Path, header: PackHeader, wanted: PackFile, manifest: Manifest) -> None:
    if header.pack_id != manifest.pack_id or header.fingerprint != manifest.fingerprint:
        raise ShardError(f"{path}: belongs to another pack")
    if header.layer != wanted.layer:
        raise ShardError(f"{path}: holds layer {header.layer}, wanted {wanted.layer}")


def _check_expert_count(path: Path, header: PackHeader, config: ModelConfig) -> None:
    if header.n_experts != config.n_experts:
        raise ShardError(
            f"{path}: has {header.n_experts} experts, the config says {config.n_experts}"
        )


def _layouts(
    directory: Path, config: ModelConfig, stripes: Sequence[Sequence[RecordFile]]
) -> tuple[ExpertLayout, ...]:
    """Each layer's layout, of the shapes that the config wants; a missing layer has another's."""
    official = ExpertLayout.of_pieces(expert_pieces(config))
    known = [files[0].header.layout for files in stripes if files]
    for files in stripes:
        for file in files:
            layout = file.header.layout
            if layout != files[0].header.layout or not _fits(layout, official, config):
                raise ShardError(
                    f"{file.shard.path}: its experts are {layout.format} of the shapes "
                    f"{[list(piece.shape) for piece in layout.pieces]}, not those of the config"
                )
    if not known:
        raise ShardError(f"{directory}: an expert pack without experts")
    return tuple(files[0].header.layout if files else known[0] for files in stripes)


def _fits(layout: ExpertLayout, official: ExpertLayout, config: ModelConfig) -> bool:
    width, inner = config.hidden_size, config.expert_width
    shapes = ((inner, width), (inner, width), (width, inner))
    for number, (name, shape) in enumerate(zip(layout.formats, shapes, strict=True)):
        matrix, scale = layout.pieces[2 * number : 2 * number + 2]
        if name == FP4:
            if (matrix, scale) != tuple(official.pieces[2 * number : 2 * number + 2]):
                return False
        elif matrix.shape != shape:
            return False
    return True


def _fingerprint(raw_config: Mapping[str, Any], manifest: Manifest) -> bytes:
    """Return 16 bytes: of the config, and of every file by its name, place, size and hash."""
    config = json.dumps(raw_config, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    lines = [config, manifest.pack_id.hex()]
    lines += [f"{file.place}/{file.name} {file.n_bytes} {file.hash}" for file in manifest.files]
    lines += [f"{link.name} {link.n_bytes} {link.header}" for link in manifest.links]
    return xxhash.xxh3_128_digest("\n".join(lines).encode())


def _role(wanted: PackFile, manifest: Manifest) -> str:
    if wanted.place == MIRROR:
        return f"layer {wanted.layer} of the mirror"
    if manifest.stripes:
        return f"layer {wanted.layer}, {wanted.place} of {len(manifest.stripes)}"
    return f"layer {wanted.layer}"


def _read(descriptor: int, path: Path, offset: int, n_bytes: int) -> bytes:
    parts: list[bytes] = []
    while n_bytes:
        part = os.pread(descriptor, n_bytes, offset)
        if not part:
            raise ShardError(f"{path}: ends at byte {offset}")
        parts.append(part)
        offset += len(part)
        n_bytes -= len(part)
    return b"".join(parts)
