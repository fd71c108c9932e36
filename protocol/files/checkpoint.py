"""A model, opened and checked whole: config, headers, names, shapes, the fingerprint.

A `.gguf` file, and a directory that holds such files and no safetensors, is a GGUF model; a
directory with a `pack.json` is an expert pack, any other one an official checkpoint.

Invariants: a Checkpoint that exists holds every tensor of its config exactly once, with the right
dtype and shape, inside a file that was long enough when it was opened. No file stays open, and
nothing behind a header is read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from protocol.errors import ConfigError

from .collector import collector_paused
from .engram_places import engram_tables_of
from .gguf_config import GgufModel
from .gguf_contents import open_gguf
from .gguf_index import SUFFIX as GGUF_SUFFIX
from .gguf_index import GgufIndex, has_gguf
from .model_config import CONFIG_NAME, ModelConfig, parse_model_config, read_config_json
from .pack_directory import open_pack
from .pack_manifest import is_pack
from .safetensors_index import (
    INDEX_NAME,
    SINGLE_NAME,
    SafetensorsIndex,
    Shard,
    TensorEntry,
    load_index,
)
from .slice_map import EngramTable, SliceMap
from .tensor_check import check_tensors
from .tensor_table import (
    dense_tensors,
    expected_tensors,
    is_engram_table,
    is_expert,
)

DEMO_PACKAGE = "demo"
FINGERPRINT_BYTES = 16

Kind = Literal["official", "pack", "gguf"]
TensorKind = Literal["dense", "expert", "engram", "skipped"]


@dataclass(frozen=True, slots=True)
class GgufPart:
    """What a GGUF has that the other kinds keep in files of their own."""

    index: GgufIndex  # with all metadata, the tokenizer's among them
    model: GgufModel


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose every tensor has been checked against its config; holds no open file."""

    directory: Path  # where its files are; of a GGUF that of the first file
    path: Path  # what opens it again: the directory, or a GGUF's file
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
    gguf: GgufPart | None = field(default=None, compare=False)

    def expert_format(self, layer: int) -> str:
        """Format of a layer's experts: "FP4", or block types such as "Q4_K" or "Q2_K/Q3_K"."""
        return self.slice_map.layouts[layer].format

    def dense_tensors(self) -> Iterator[TensorEntry]:
        """The tensors that compute loads: no byte of a routed expert or an Engram table."""
        names = dense_tensors(self.config)
        return (self.tensors[name] for name in names if name in self.tensors)

    def tensor_kinds(self) -> dict[str, TensorKind]:
        """Return whose each tensor is; whatever passed the check and is nobody's is skipped."""
        dense = dense_tensors(self.config)
        kinds: dict[str, TensorKind] = {}
        for name in self.tensors:
            if name in dense:
                kinds[name] = "dense"
            elif is_engram_table(name):
                kinds[name] = "engram"
            else:
                kinds[name] = "expert" if is_expert(name) else "skipped"
        return kinds

    def notes(self) -> tuple[str, ...]:
        """Return what its user should know once, a line each: what is left alone or assumed."""
        kinds = self.tensor_kinds()
        skipped = Counter(
            _family(name)
            for name, kind in kinds.items()
            if kind == "skipped" and not name.startswith("layers.")  # a bias that text never adds
        )
        lines = []
        if skipped:
            listed = ", ".join(f"{count} of {name}" for name, count in sorted(skipped.items()))
            lines.append(f"tensors left alone: {listed}")
        if self.gguf is not None and self.gguf.model.defaulted:
            keys = ", ".join(self.gguf.model.defaulted)
            lines.append(f"metadata that {self.path.name} lacks, by rule or default: {keys}")
        return tuple(lines)


@collector_paused()
def open_checkpoint(directory: Path, *, incomplete: bool = False) -> Checkpoint:
    """Open and check a model directory or a GGUF's file; raises ConfigError or ShardError.

    `incomplete` accepts a pack that holds a share of the layers, for looking at it.
    """
    kind = model_kind(directory)
    if kind == "gguf":
        return _open_gguf(directory)
    if kind == "pack":
        return _open_pack(directory, incomplete=incomplete)
    raw = read_config_json(directory)
    config = parse_model_config(raw, str(directory / CONFIG_NAME))
    expected = expected_tensors(config)
    index = load_index(directory, expected)
    check_tensors(directory, index.tensors, expected)
    return Checkpoint(
        directory=directory,
        path=directory,
        config=config,
        shards=index.shards,
        tensors=index.tensors,
        slice_map=SliceMap.build(config, index.shards, index.tensors),
        engram_tables=engram_tables_of(config, index.tensors),
        fingerprint=model_fingerprint(raw, index),
    )


def model_kind(path: Path) -> Kind:
    """Return which kind of model a path is, by names alone; its content may still be refused."""
    if path.suffix == GGUF_SUFFIX and not path.is_dir():
        return "gguf"
    if is_pack(path):
        return "pack"
    has_safetensors = any((path / name).exists() for name in (INDEX_NAME, SINGLE_NAME))
    return "gguf" if not has_safetensors and has_gguf(path) else "official"


def _open_gguf(path: Path) -> Checkpoint:
    contents = open_gguf(path)
    return Checkpoint(
        directory=contents.index.shards[0].path.parent,
        path=path,
        config=contents.model.config,
        shards=contents.index.shards,
        tensors=contents.tensors,
        slice_map=contents.slice_map,
        engram_tables=contents.engram_tables,
        fingerprint=contents.fingerprint,
        kind="gguf",
        gguf=GgufPart(contents.index, contents.model),
    )


def _open_pack(directory: Path, *, incomplete: bool) -> Checkpoint:
    pack = open_pack(directory, incomplete=incomplete)
    return Checkpoint(
        directory=directory,
        path=directory,
        config=pack.config,
        shards=pack.shards,
        tensors=pack.tensors,
        slice_map=pack.slice_map,
        engram_tables=pack.engram_tables,
        fingerprint=pack.fingerprint,
        kind="pack",
        checksums=pack.slice_map.checksums,
        warnings=pack.warnings,
        gguf=GgufPart(pack.gguf.index, pack.gguf.model) if pack.gguf else None,
    )


def model_fingerprint(raw_config: dict[str, Any], index: SafetensorsIndex) -> bytes:
    """Return the 16 bytes that say whether two model directories are the same weights' layout.

    xxh3_128 over the config as canonical JSON, then for each shard its name and size and for each
    of its tensors name, dtype, shape and range. Times, contents and the directory do not count.
    """
    digest = xxhash.xxh3_128()
    config = json.dumps(raw_config, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    digest.update(config.encode() + b"\n")
    lines: dict[int, list[str]] = {  # by the shard's id: to hash 90,000 paths takes long
        id(shard): [json.dumps(["shard", shard.name, shard.n_bytes])] for shard in index.shards
    }
    in_json = json.JSONEncoder().encode  # of a name, without a new encoder each time
    for name, dtype, shape, shard, offset, n_bytes in index.tensors.values():
        lines[id(shard)].append(f"{in_json(name)} {dtype} {shape} {offset} {n_bytes}")
    for shard_lines in lines.values():
        digest.update("\n".join([*shard_lines, ""]).encode())
    return digest.digest()


def resolve_model(name_or_path: str | Path) -> Path:
    """Return the directory or GGUF file that a `--model` names; "demo" is the installed demo.

    A directory of that name is written `./demo`. Raises ConfigError where there is no such model.
    """
    if name_or_path == DEMO_PACKAGE:
        return _demo_directory()
    directory = Path(name_or_path).expanduser()
    is_file = directory.suffix == GGUF_SUFFIX and directory.is_file()
    if not str(name_or_path) or not (directory.is_dir() or is_file):
        raise ConfigError(
            f"model {str(name_or_path)!r}: no such directory, no {GGUF_SUFFIX} file, and not 'demo'"
        )
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


def _family(name: str) -> str:
    """Return the stage or tower that a tensor left alone belongs to."""
    first, dot, _ = name.partition(".")
    return first if dot else first.partition("_")[0]
