"""A model directory, opened and checked whole: config, headers, names, shapes, the fingerprint.

Invariants: a Checkpoint that exists holds every tensor of its config exactly once, with the right
dtype and shape, inside a file that was long enough when it was opened. No file stays open, and
nothing behind a header is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import xxhash

from protocol.errors import ConfigError, ShardError

from .model_config import CONFIG_NAME, ModelConfig, parse_model_config, read_config_json
from .safetensors_index import SafetensorsIndex, Shard, TensorEntry, load_index
from .slice_map import ByteRange, EngramTable, SliceMap
from .tensor_table import (
    ExpectedTensor,
    dense_tensors,
    expected_tensors,
    is_skipped,
    tensor_label,
)

DEMO_PACKAGE = "demo"
FINGERPRINT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose every tensor has been checked against its config; holds no open file."""

    directory: Path
    config: ModelConfig
    shards: tuple[Shard, ...]  # ascending by name
    tensors: dict[str, TensorEntry]  # all of the files, the skipped ones too
    slice_map: SliceMap
    engram_tables: tuple[EngramTable, ...]
    fingerprint: bytes  # 16

    def dense_tensors(self) -> Iterator[TensorEntry]:
        """The tensors that compute loads: no byte of a routed expert or an Engram table."""
        return (self.tensors[name] for name in dense_tensors(self.config))


def open_checkpoint(directory: Path) -> Checkpoint:
    """Open and check a model directory; raises ConfigError or ShardError."""
    raw = read_config_json(directory)
    config = parse_model_config(raw, str(directory / CONFIG_NAME))
    index = load_index(directory)
    _check_tensors(directory, index, expected_tensors(config))
    return Checkpoint(
        directory=directory,
        config=config,
        shards=index.shards,
        tensors=index.tensors,
        slice_map=SliceMap.build(config, index.shards, index.tensors),
        engram_tables=_engram_tables(config, index.tensors),
        fingerprint=model_fingerprint(raw, index),
    )


def model_fingerprint(raw_config: dict[str, Any], index: SafetensorsIndex) -> bytes:
    """Return the 16 bytes that say whether two model directories are the same weights' layout.

    xxh3_128 over the config as canonical JSON, then for each shard its name and size and for each
    of its tensors name, dtype, shape and range. Times, contents and the directory do not count.
    """
    digest = xxhash.xxh3_128()
    config = json.dumps(raw_config, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    digest.update(config.encode() + b"\n")
    lines: dict[Path, list[str]] = {
        shard.path: [json.dumps(["shard", shard.name, shard.n_bytes])] for shard in index.shards
    }
    for name, dtype, shape, shard, offset, n_bytes in index.tensors.values():
        lines[shard.path].append(f"{json.dumps(name)} {dtype} {shape} {offset} {n_bytes}")
    for shard_lines in lines.values():
        digest.update("\n".join([*shard_lines, ""]).encode())
    return digest.digest()


def resolve_model(name_or_path: str | Path) -> Path:
    """Return the directory that a `--model` names; "demo" is the installed demo model.

    A directory of that name is written `./demo`. Raises ConfigError where there is no such model.
    """
    if name_or_path == DEMO_PACKAGE:
        return _demo_directory()
    directory = Path(name_or_path).expanduser()
    if not str(name_or_path) or not directory.is_dir():
        raise ConfigError(f"model {str(name_or_path)!r}: no such directory, and not 'demo'")
    return directory


def _demo_directory() -> Path:
    spec = find_spec(DEMO_PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigError("model 'demo': the package 'demo' is not installed")
    directory = Path(spec.origin).parent
    if not (directory / CONFIG_NAME).is_file():
        raise ConfigError(
            f"model 'demo': {directory} has no {CONFIG_NAME}, so it is not headrace's demo"
        )
    return directory


def _check_tensors(
    directory: Path, index: SafetensorsIndex, expected: dict[str, ExpectedTensor]
) -> None:
    tensors = index.tensors
    for name, wanted in expected.items():
        entry = tensors.get(name)
        if entry is None:
            raise ShardError(
                f"{directory}: {tensor_label(name)} is in no shard, "
                f"wanted {wanted.dtype} {list(wanted.shape)}"
            )
        if entry.dtype != wanted.dtype or entry.shape != wanted.shape:
            raise ShardError(
                f"{entry.shard.path}: {tensor_label(name)} is {entry.dtype} {list(entry.shape)}, "
                f"wanted {wanted.dtype} {list(wanted.shape)}"
            )
    for name, entry in tensors.items():
        if name not in expected and not is_skipped(name):
            raise ShardError(
                f"{entry.shard.path}: {tensor_label(name)} is no part of the model that "
                f"{CONFIG_NAME} describes"
            )


def _engram_tables(config: ModelConfig, tensors: dict[str, TensorEntry]) -> tuple[EngramTable, ...]:
    tables: list[EngramTable] = []
    for index, layer in enumerate(config.engram_layers):
        values = tensors[f"layers.{layer}.engram.embed.weight"]
        scales = tensors[f"layers.{layer}.engram.embed.scale"]
        n_rows = config.engram_n_rows[index]
        tables.append(
            EngramTable(
                index=index,
                layer=layer,
                n_rows=n_rows,
                values=ByteRange(values.shard, values.offset, values.n_bytes),
                scales=ByteRange(scales.shard, scales.offset, scales.n_bytes),
                value_bytes=values.n_bytes // n_rows,
                scale_bytes=scales.n_bytes // n_rows,
            )
        )
    return tuple(tables)
