"""What lies in a folder of the shape of `v41-tiny`: token ids, and golden tensors beside them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

# A golden file and the precision that it was made at; the last is no oracle.
PRECISION_OF = {
    "golden_noround_fp32": "unrounded",
    "golden_round_fp32": "wide",
    "own_bf16_informative": "vendor",
}
ORACLES = ("golden_noround_fp32", "golden_round_fp32")


@dataclass(frozen=True, slots=True)
class Golden:
    """One golden file; what a file lacks is empty."""

    name: str
    ids: list[int]
    logits: Tensor  # [T, vocab]
    streams: Tensor  # [layers, T, S, H], after each layer
    pre: Tensor  # [layers, T, S], handed to the next layer
    engram_rows: Tensor  # [T, tables, columns] int64
    picks: dict[int, Tensor]  # a layer: [T, top_k] int64, ascending
    weights: dict[int, Tensor]  # a layer: [T, top_k], as picks
    selections: dict[int, Tensor]  # an index source: [T, index_top_k] int64, -1 = none


def read_ids(directory: Path) -> list[int]:
    """Return the token ids of a folder."""
    ids: list[int] = load_file(directory / "tokens.safetensors")["input_ids"].flatten().tolist()
    return ids


def golden_names(directory: Path) -> list[str]:
    """Return the golden files that a folder has, oracles first."""
    return [name for name in PRECISION_OF if (directory / f"{name}.safetensors").exists()]


def read_golden(directory: Path, name: str, n_layers: int) -> Golden:
    """Return one golden file of a folder."""
    tensors = load_file(directory / f"{name}.safetensors")
    empty = torch.empty(0)

    def by_layer(pattern: str) -> dict[int, Tensor]:
        names = {layer: pattern.format(layer) for layer in range(n_layers)}
        return {layer: tensors[name] for layer, name in names.items() if name in tensors}

    return Golden(
        name=name,
        ids=read_ids(directory),
        logits=tensors["logits"].float(),
        streams=tensors["h_out"].float(),
        pre=tensors.get("pre_out", empty),
        engram_rows=tensors.get("engram_rows", empty).long(),
        picks={layer: ids.long() for layer, ids in by_layer("router.{}.ids").items()},
        weights=by_layer("router.{}.weights"),
        selections={layer: rows.long() for layer, rows in by_layer("select.{}").items()},
    )
