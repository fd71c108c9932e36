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

from .gguf_contents import GgufRest
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
from .pack_plain import open_plain_files
from .record_map import RecordFile, RecordMap
from .safetensors_header import Shard, TensorEntry
from .slice_map import FP4, EngramTable, ExpertLayout
from .tensor_table import expert_pieces


@dataclass(frozen=True, slots=True)
class PackContents:
    """What a pack directory holds."""

    manifest: Manifest
    config: ModelConfig
    shards: tuple[Shard, ...]
    tensors: dict[str, TensorEntry]  # dense ones and Engram tables
    engram_tables: tuple[EngramTable, ...]
    slice_map: RecordMap
    fingerprint: bytes
    warnings: tuple[str, ...]
    gguf: GgufRest | None  # of a pack that was made from a GGUF


def open_pack(directory: Path, *, incomplete: bool = False) -> PackContents:
    """Open and check a pack; `incomplete` accepts a share of the layers.

    Raises ConfigError or ShardError.
    """
    manifest = read_manifest(directory)
    plain = open_plain_files(directory, manifest)
    config = plain.config
    _check_layers(directory, manifest, config, incomplete=incomplete)
    stripes = _stripe_files(directory, manifest, config)
    mirrors, warnings = _mirror_files(directory, manifest, config)
    if manifest.missing_layers:
        lost = layer_ranges(manifest.missing_layers)
        warnings = (f"incomplete: the experts of layers {lost} are missing", *warnings)
    layouts = _layouts(directory, config, stripes)
    slice_map = RecordMap(config, layouts, stripes, mirrors)
    return PackContents(
        manifest=manifest,
        config=config,
        shards=(*plain.shards, *slice_map.shards),
        tensors=plain.tensors,
        engram_tables=plain.engram_tables,
        slice_map=slice_map,
        fingerprint=_fingerprint(plain.raw_config, manifest),
        warnings=warnings,
        gguf=plain.gguf,
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
        stripe = int(wanted.place.rpartition(" ")[2]) + 1
        return f"layer {wanted.layer}, stripe {stripe} of {len(manifest.stripes)}"
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
