"""How well a layer's picks were foretold by earlier layers' inputs: `headrace simulate`'s report.

Reads what `--predict-trace FILE` recorded. Recall at distance d: of the experts that a layer
picked, the share that its router picks of the input d layers before.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ConfigError
from protocol.files.guess_format import (
    HEADER_BYTES,
    FoundGuesses,
    GuessShape,
    decode_blocks,
    decode_header,
)
from protocol.files.plain_file import open_plain, read_first

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class Recall:
    """At one distance, over all tokens."""

    distance: int
    by_layer: tuple[float, ...]  # from layer `distance` on

    @property
    def mean(self) -> float:
        """Over the layers that have a layer so far before them."""
        return sum(self.by_layer) / len(self.by_layer)

    @property
    def worst(self) -> int:
        """The layer that is foretold worst."""
        return self.distance + self.by_layer.index(min(self.by_layer))

    def as_json(self) -> dict[str, Any]:
        """All figures by name, for programs."""
        worst = min(self.by_layer)
        return {
            "distance": self.distance,
            "recall": self.mean,
            "worst_layer": self.worst,
            "worst_recall": worst,
            "by_layer": list(self.by_layer),
        }


def read_guesses(path: Path) -> tuple[GuessShape, FoundGuesses]:
    """Return what a file holds. Raises ConfigError where it is none, or holds no token."""
    descriptor = open_plain(path, where=str(path))
    try:
        shape = decode_header(read_first(descriptor, HEADER_BYTES), str(path))
        data = read_first(descriptor, os.fstat(descriptor).st_size)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    finally:
        os.close(descriptor)
    found = decode_blocks(data, shape)
    if not len(found.records):
        raise ConfigError(f"{path}: no token in it")
    return shape, found


def recalls(shape: GuessShape, records: NDArray[np.void]) -> list[Recall]:
    """Return the recall at each distance that the model has layers for."""
    picks = records["picks"]
    found = []
    for distance in range(1, min(shape.n_distances, shape.n_layers - 1) + 1):
        guesses = records["guesses"][:, distance:, distance - 1]
        shared = (picks[:, distance:, :, None] == guesses[:, :, None, :]).any(-1)
        found.append(Recall(distance, tuple(shared.mean(axis=(0, 2)).tolist())))
    return found


def recall_facts(path: Path, shape: GuessShape, records: NDArray[np.void]) -> dict[str, Any]:
    """All of it by name, for programs."""
    return {
        "predictions": str(path),
        "n_tokens": len(records),
        "n_layers": shape.n_layers,
        "n_experts": shape.n_experts,
        "top_k": shape.top_k,
        "chance": shape.top_k / shape.n_experts,
        "distances": [one.as_json() for one in recalls(shape, records)],
    }


def recall_table(shape: GuessShape, records: NDArray[np.void]) -> Table:
    """The recalls as a table."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in ("layers\nbefore", "recall", "worst\nlayer", "its\nrecall"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in recalls(shape, records):
        worst = min(one.by_layer)
        table.add_row(str(one.distance), f"{one.mean:.1%}", str(one.worst), f"{worst:.1%}")
    return table
