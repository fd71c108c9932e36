"""A model directory, opened and checked whole: config, headers, names, shapes, the fingerprint.

A directory with a `pack.json` is an expert pack, any other one an official checkpoint.

Invariants: a Checkpoint that exists holds every tensor of its config exactly once, with the right
dtype and shape, inside a file that was long enough when it was opened. No file stays open, and
nothing behind a header is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from protocol.errors import ConfigError

from .model_config import CONFIG_NAME, ModelConfig, parse_model_config, read_config_json
from .pack_directory import open_pack
from .pack_manifest import is_pack
from .safetensors_index import SafetensorsIndex, Shard, TensorEntry, load_index
from .slice_map import ByteRange, EngramTable, SliceMap
from .tensor_check import check_tensors
from .tensor_table import dense_tensors, engram_rows_name, expected_tensors

DEMO_PACKAGE = "demo"
FINGERPRINT_BYTES = 16

Kind = Literal["official", "pack"]


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
    kind: Kind = "official"
    # Checksums of the slots, [n_layers, n_experts], where the source has them.
    checksums: NDArray[np.uint64] | None = field(default=None, compare=False)
    warnings: tuple[str, ...] = ()  # what is wrong, but not in the way

    def expert_format(self, layer: int) -> str:
        """Format of a layer's experts: "FP4", or block types such as "Q4_K" or "Q2_K/Q3_K"."""
        return self.slice_map.layouts[layer].format

    def dense_tensors(self) -> Iterator[TensorEntry]:
        """The tensors that compute loads: no byte of a routed expert or an Engram table."""
        return (self.tensors[name] for name in dense_tensors(self.config))


def open_checkpoint(directory: Path, *, incomplete: bool = False) -> Checkpoint:
    """Open and check a model directory; raises ConfigError or ShardError.

    `incomplete` accepts a pack that holds a share of the layers, for looking at it.
    """
    raw = read_config_json(directory)
    config = parse_model_config(raw, str(directory / CONFIG_NAME))
    if is_pack(directory):
        return _open_pack(directory, raw, config, incomplete=incomplete)
    index = load_index(directory)
    check_tensors(directory, index.tensors, expected_tensors(config))
    return Checkpoint(
        directory=directory,
        config=config,
        shards=index.shards,
        tensors=index.tensors,
        slice_map=SliceMap.build(config, index.shards, index.tensors),
        engram_tables=_engram_tables(config, index.tensors),
        fingerprint=model_fingerprint(raw, index),
    )


def _open_pack(
    directory: Path, raw: dict[str, Any], config: ModelConfig, *, incomplete: bool
) -> Checkpoint:
    pack = open_pack(directory, config, raw, incomplete=incomplete)
    return Checkpoint(
        directory=directory,
        config=config,
        shards=pack.shards,
        tensors=pack.tensors,
        slice_map=pack.slice_map,
        engram_tables=_engram_tables(config, pack.tensors),
        fingerprint=pack.fingerprint,
        kind="pack",
        checksums=pack.slice_map.checksums,
        warnings=pack.warnings,
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


def _engram_tables(config: ModelConfig, tensors: dict[str, TensorEntry]) -> tuple[EngramTable, ...]:
    return tuple(
        _engram_table(index, layer, n_rows, tensors)
        for index, (layer, n_rows) in enumerate(
            zip(config.engram_layers, config.engram_n_rows, strict=True)
        )
    )


def _engram_table(
    index: int, layer: int, n_rows: int, tensors: dict[str, TensorEntry]
) -> EngramTable:
    """One table; where values and scales stand together, its row is all values and no scale."""
    rows = tensors.get(engram_rows_name(layer))
    values = rows or tensors[f"layers.{layer}.engram.embed.weight"]
    scales = None if rows else tensors[f"layers.{layer}.engram.embed.scale"]
    return EngramTable(
        index=index,
        layer=layer,
        n_rows=n_rows,
        values=ByteRange(values.shard, values.offset, values.n_bytes),
        scales=ByteRange(scales.shard, scales.offset, scales.n_bytes)
        if scales
        else ByteRange(values.shard, values.offset, 0),
        value_bytes=values.n_bytes // n_rows,
        scale_bytes=scales.n_bytes // n_rows if scales else 0,
    )
