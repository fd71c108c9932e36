"""What a pack has beside its records: dense tensors and Engram tables, in safetensors or in GGUF.

A pack of a GGUF keeps a GGUF without experts, whose metadata are its config and tokenizer. Of a
linked shard only the tables count. No file stays open, and behind headers nothing is read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from protocol.errors import ShardError

from .engram_places import engram_tables_of
from .gguf_contents import GgufRest, open_gguf_rest
from .gguf_header import GgufHeader, GgufTensor, read_gguf_header
from .gguf_index import SUFFIX as GGUF_SUFFIX
from .gguf_index import GgufIndex
from .gguf_names import official_name
from .model_config import CONFIG_NAME, ModelConfig, parse_model_config, read_config_json
from .pack_manifest import MANIFEST_NAME, Manifest, SourceFile
from .safetensors_header import LENGTH_BYTES, Shard, TensorEntry
from .safetensors_index import read_header
from .slice_map import EngramTable
from .tensor_check import check_tensors
from .tensor_table import (
    ExpectedTensor,
    dense_tensors,
    engram_rows_name,
    engram_tensors,
    is_engram_table,
    tensor_label,
)


@dataclass(frozen=True, slots=True)
class PlainFiles:
    """Everything of a pack but its records."""

    config: ModelConfig
    shards: tuple[Shard, ...]
    tensors: dict[str, TensorEntry]
    engram_tables: tuple[EngramTable, ...]
    raw_config: Mapping[str, Any] = field(default_factory=dict)  # where there is a config.json
    gguf: GgufRest | None = None


def open_plain_files(directory: Path, manifest: Manifest) -> PlainFiles:
    """Open and check them; raises ConfigError or ShardError."""
    if any(file.kind == "dense" and file.name.endswith(GGUF_SUFFIX) for file in manifest.files):
        rest = open_gguf_rest(_gguf_index(directory, manifest))
        return PlainFiles(
            rest.model.config, rest.index.shards, rest.tensors, rest.engram_tables, gguf=rest
        )
    raw = read_config_json(directory)
    config = parse_model_config(raw, str(directory / CONFIG_NAME))
    shards, tensors = _plain_tensors(directory, manifest)
    check_tensors(directory, tensors, _expected(config, tensors))
    return PlainFiles(config, tuple(shards), tensors, engram_tables_of(config, tensors), raw)


def header_hash(path: Path) -> str:
    """Return 16 hex digits of the header of a safetensors or GGUF file, its length included."""
    if path.suffix == GGUF_SUFFIX:
        n_header = read_gguf_header(path).data_offset
        with path.open("rb") as file:
            return xxhash.xxh3_64_hexdigest(file.read(n_header))
    with path.open("rb") as file:
        start = file.read(LENGTH_BYTES)
        n_header = int.from_bytes(start, "little")
        n_file = os.fstat(file.fileno()).st_size
        header = start + file.read(min(n_header, max(0, n_file - LENGTH_BYTES)))
    return xxhash.xxh3_64_hexdigest(header)


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
        _check_link(path, link)
    return shards, tensors


def _gguf_index(directory: Path, manifest: Manifest) -> GgufIndex:
    """The index of a GGUF without experts: the dense file's, and the tables' wherever they are."""
    headers: list[GgufHeader] = []
    tensors: dict[str, GgufTensor] = {}

    def add(path: Path, n_bytes: int, *, tables_only: bool) -> None:
        header = read_gguf_header(path)
        if header.shard.n_bytes != n_bytes:
            raise ShardError(
                f"{path}: has {header.shard.n_bytes} bytes, {MANIFEST_NAME} says {n_bytes}"
            )
        headers.append(header)
        for tensor in header.tensors:
            if tables_only and not is_engram_table(official_name(tensor.name) or ""):
                continue
            other = tensors.setdefault(tensor.name, tensor)
            if other is not tensor:
                raise ShardError(
                    f"tensor {tensor.name!r} stands twice: in {other.shard.path} and in {path}"
                )

    for kind in ("dense", "engram"):
        for file in manifest.files:
            if file.kind == kind:
                path = manifest.directory(directory, file.place) / file.name
                add(path, file.n_bytes, tables_only=kind == "engram")
    for link in manifest.links:
        add(directory / link.name, link.n_bytes, tables_only=True)
        _check_link(directory / link.name, link)
    return GgufIndex(
        tuple(header.shard for header in headers),
        headers[0].metadata,
        tensors,
        tuple(header.data_offset for header in headers),
    )


def _check_link(path: Path, link: SourceFile) -> None:
    if header_hash(path) != link.header:
        raise ShardError(f"{path}: is linked, and its header is no longer the one packed")


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
