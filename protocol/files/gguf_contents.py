"""A GGUF model as every room sees a checkpoint: official names, slices, Engram rows.

A routed expert is one part of a stack over all experts of its layer; its slot has no scales of
their own, they lie inside the blocks. An Engram row is its stored bytes, whatever their format.
Formats are free, layer by layer, so slots of two layers may differ in size.
Source: model specification, section 7.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from protocol.errors import ShardError

from .gguf_config import GgufModel, read_gguf_config
from .gguf_header import GgufTensor
from .gguf_index import GgufIndex, load_gguf
from .gguf_names import by_official_name
from .gguf_table import checked_tensors, gguf_shapes, is_row_table
from .model_config import ModelConfig
from .safetensors_header import Shard, TensorEntry
from .slice_map import PIECES, ROW_E4M3, ByteRange, EngramTable, ExpertLayout, SliceMap
from .tensor_table import ExpectedTensor

MATRICES = ("w1", "w3", "w2")  # gate, up, down
NO_SCALE = ExpectedTensor("F8_E8M0", (0,), "expert")
_HASHED_BYTES = 1 << 20  # read at a time


@dataclass(frozen=True, slots=True)
class GgufRest:
    """What the files of a GGUF model hold beside the routed experts, checked."""

    index: GgufIndex
    model: GgufModel
    tensors: dict[str, TensorEntry]  # by official name, the skipped ones too
    engram_tables: tuple[EngramTable, ...]


@dataclass(frozen=True, slots=True)
class GgufContents(GgufRest):
    """What the files of a GGUF model hold, checked; `tensors` has `*` for all experts."""

    slice_map: SliceMap
    fingerprint: bytes


def open_gguf(path: Path) -> GgufContents:
    """Open and check the model that a file, a part of a set or a directory is.

    Raises ConfigError or ShardError.
    """
    index = load_gguf(path)
    model = read_gguf_config(index)
    found = checked_tensors(model.config, index)
    return GgufContents(
        index=index,
        model=model,
        tensors=_entries(model.config, index, found),
        slice_map=_slice_map(model.config, index.shards, found),
        engram_tables=_engram_tables(model.config, found),
        fingerprint=_fingerprint(index),
    )


def open_gguf_rest(index: GgufIndex) -> GgufRest:
    """Check a model whose routed experts are elsewhere; raises ConfigError or ShardError."""
    model = read_gguf_config(index)
    found = checked_tensors(model.config, index, experts=False)
    return GgufRest(
        index=index,
        model=model,
        tensors=_entries(model.config, index, found),
        engram_tables=_engram_tables(model.config, found),
    )


def _entries(
    config: ModelConfig, index: GgufIndex, found: Mapping[str, GgufTensor]
) -> dict[str, TensorEntry]:
    shapes = gguf_shapes(config)
    entries = {}
    for name, tensor in by_official_name(index.tensors).items():
        shape = tensor.shape if is_row_table(tensor) else shapes.get(name, tensor.shape)
        entries[name] = TensorEntry(
            name, tensor.block.name, shape, tensor.shard, tensor.offset, tensor.n_bytes
        )
    assert found.keys() <= entries.keys()
    return entries


def _slice_map(
    config: ModelConfig, shards: tuple[Shard, ...], found: Mapping[str, GgufTensor]
) -> SliceMap:
    number_of = {shard.path: number for number, shard in enumerate(shards)}
    size = (config.n_layers, config.n_experts, len(PIECES))
    numbers, offsets = np.zeros(size, np.int32), np.zeros(size, np.int64)
    experts = np.arange(config.n_experts, dtype=np.int64)
    layouts: dict[tuple[str, ...], ExpertLayout] = {}
    by_layer = []
    for layer in range(config.n_layers):
        stacks = [found[f"layers.{layer}.ffn.experts.*.{name}.weight"] for name in MATRICES]
        for piece, stack in zip((0, 2, 4), stacks, strict=True):
            numbers[layer, :, piece] = number_of[stack.shard.path]
            offsets[layer, :, piece] = stack.offset + experts * (stack.n_bytes // config.n_experts)
        formats = tuple(stack.block.name for stack in stacks)
        if formats not in layouts:
            layouts[formats] = _layout(stacks)
        by_layer.append(layouts[formats])
    numbers.flags.writeable = False
    offsets.flags.writeable = False
    return SliceMap(config, tuple(by_layer), shards, numbers, offsets)


def _layout(stacks: list[GgufTensor]) -> ExpertLayout:
    pieces = []
    for stack in stacks:
        pieces += [ExpectedTensor(stack.block.name, stack.shape[1:], "expert"), NO_SCALE]
    return ExpertLayout.of_pieces(pieces)


def _engram_tables(config: ModelConfig, found: Mapping[str, GgufTensor]) -> tuple[EngramTable, ...]:
    tables = []
    for number, layer in enumerate(config.engram_layers):
        tensor = found[f"layers.{layer}.engram.embed.weight"]
        tables.append(
            EngramTable(
                index=number,
                layer=layer,
                n_rows=tensor.shape[0],
                values=ByteRange(tensor.shard, tensor.offset, tensor.n_bytes),
                scales=ByteRange(tensor.shard, tensor.offset, 0),
                value_bytes=tensor.row_bytes,
                scale_bytes=0,
                format=ROW_E4M3 if is_row_table(tensor) else tensor.block.name,
            )
        )
    return tuple(tables)


def _fingerprint(index: GgufIndex) -> bytes:
    """Return 16 bytes: xxh3_128 over each file's name, size and whole header."""
    digest = xxhash.xxh3_128()
    for shard, n_header in zip(index.shards, index.data_offsets, strict=True):
        digest.update(json.dumps(["gguf", shard.name, shard.n_bytes]).encode() + b"\n")
        try:
            with shard.path.open("rb", buffering=0) as file:
                _hash_header(digest, file.fileno(), n_header, shard)
        except OSError as error:
            raise ShardError(f"{shard.path}: cannot be read: {error.strerror or error}") from None
    return digest.digest()


def _hash_header(digest: xxhash.xxh3_128, descriptor: int, n_header: int, shard: Shard) -> None:
    n_header = min(n_header, shard.n_bytes)  # of a file without data the padding may be missing
    at = 0
    while at < n_header:
        part = os.pread(descriptor, min(_HASHED_BYTES, n_header - at), at)
        if not part:
            raise ShardError(f"{shard.path}: ends at byte {at}, inside its header")
        digest.update(part)
        at += len(part)
