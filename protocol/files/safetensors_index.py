"""What the safetensors files of a model directory hold, by their headers alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Shard:
    """One weight file."""

    path: Path
    n_bytes: int

    @property
    def name(self) -> str:
        """The file's name without its directory."""
        return self.path.name


class TensorEntry(NamedTuple):
    """One tensor of a shard; `offset` counts from the start of the file."""

    name: str
    dtype: str  # as in the header: BF16, F32, F8_E4M3, F8_E8M0, I8
    shape: tuple[int, ...]
    shard: Shard
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """One shard's checked header: its tensors, ascending by offset."""

    shard: Shard
    tensors: tuple[TensorEntry, ...]


@dataclass(frozen=True, slots=True)
class SafetensorsIndex:
    """All shards of a directory, ascending by name, and all their tensors by name."""

    shards: tuple[Shard, ...]
    tensors: dict[str, TensorEntry]


def read_header(path: Path) -> ShardHeader:
    """Return the checked header of one file; raises ShardError."""
    raise NotImplementedError


def load_index(directory: Path) -> SafetensorsIndex:
    """Return what the shards of a model directory hold; raises ShardError."""
    raise NotImplementedError
