"""Where the Engram tables of safetensors files lie: values and scales apart, or row by row."""

from __future__ import annotations

from collections.abc import Mapping

from .model_config import ModelConfig
from .safetensors_header import TensorEntry
from .slice_map import ByteRange, EngramTable
from .tensor_table import engram_rows_name


def engram_tables_of(
    config: ModelConfig, tensors: Mapping[str, TensorEntry]
) -> tuple[EngramTable, ...]:
    """Return the tables of checked tensors, in the order of their layers."""
    return tuple(
        _engram_table(index, layer, n_rows, tensors)
        for index, (layer, n_rows) in enumerate(
            zip(config.engram_layers, config.engram_n_rows, strict=True)
        )
    )


def _engram_table(
    index: int, layer: int, n_rows: int, tensors: Mapping[str, TensorEntry]
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
