"""A model directory, opened and checked whole: config, headers, names, shapes, the fingerprint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .model_config import ModelConfig
from .safetensors_index import Shard, TensorEntry
from .slice_map import EngramTable, SliceMap
from .tensor_table import dense_tensors

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
    raise NotImplementedError


def resolve_model(name_or_path: str | Path) -> Path:
    """Return the directory that a `--model` names; "demo" is the installed demo model."""
    raise NotImplementedError
