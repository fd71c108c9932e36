"""A GGUF of an official checkpoint: the same values where the chosen types hold them.

Without choices nothing is lost: experts become MXFP4, fp8 matrices BF16 (an E4M3 value times a
power of two is one), Engram rows stay E4M3 with their scales behind them; what is unquantised stays
as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from compute.model.tensor_reader import TensorReader
from kernels.formats import QUANTISERS, fp4, fp8, mxfp4
from protocol.files.block_sizes import BLOCK_TYPE_OF_NAME
from protocol.files.checkpoint import Checkpoint
from protocol.files.gguf_names import gguf_names
from protocol.files.gguf_table import ROW_ENCODING, ROW_ENCODING_KEY, gguf_shapes
from protocol.files.slice_map import Slice
from tests.support.fake_gguf import FakeTensor, Typed, fake_metadata, write_gguf, write_split

Types = Callable[[str, tuple[int, ...]], str | None]
CPU = torch.device("cpu")


def convert(
    checkpoint: Checkpoint,
    path: Path,
    types: Types = lambda _name, _shape: None,
    *,
    n_parts: int = 1,
    ds4: bool = False,
    more: Mapping[str, Typed] | None = None,
) -> Path:
    """Write the GGUF and return its first file.

    types    the type of a tensor by its official name, `*` for experts, and its shape; None: the
             one that loses nothing
    ds4      in DS4's spellings
    """
    metadata = metadata_of(checkpoint) | dict(more or {})
    tensors = converted_tensors(checkpoint, types, ds4=ds4)
    if n_parts == 1:
        return write_gguf(path, metadata, tensors)
    size = -(-len(tensors) // n_parts)
    parts = [tensors[start : start + size] for start in range(0, len(tensors), size)]
    return write_split(path.parent, path.stem, metadata, parts)[0]


def metadata_of(checkpoint: Checkpoint) -> dict[str, Typed]:
    """Return the metadata; the token map is that of the fakes."""
    metadata = fake_metadata(replace(checkpoint.config, n_draft_stages=0))
    return metadata | {ROW_ENCODING_KEY: Typed("string", ROW_ENCODING)}


def converted_tensors(
    checkpoint: Checkpoint, types: Types = lambda _name, _shape: None, *, ds4: bool = False
) -> list[FakeTensor]:
    """Return every tensor, as `convert` writes it."""
    with TensorReader(checkpoint.tensors, CPU) as reader:
        return [
            _tensor(checkpoint, reader, name, types(name, shape), ds4=ds4)
            for name, shape in gguf_shapes(checkpoint.config).items()
        ]


def _tensor(
    checkpoint: Checkpoint, reader: TensorReader, name: str, kind: str | None, *, ds4: bool
) -> FakeTensor:
    spelling = gguf_names(name)[-1 if ds4 else 0]
    if ".experts.*." in name:
        kind, values = kind or "MXFP4", _stack(checkpoint, name, kind)
    elif name.endswith(".engram.embed.weight"):
        kind, values = kind or "I8", _rows(checkpoint, name, kind)
    else:
        stored = checkpoint.tensors[name].dtype
        kind = kind or ("F32" if stored == "F32" else "BF16")
        values = QUANTISERS[kind](reader.f32(name))
    block = BLOCK_TYPE_OF_NAME[kind]
    n_values = values.shape[-1] // block.n_bytes * block.n_values
    dims = (n_values, *reversed(values.shape[:-1]))
    return FakeTensor(spelling, dims, block.type_id, values.numpy().tobytes())


def _stack(checkpoint: Checkpoint, name: str, kind: str | None) -> Tensor:
    """A matrix of all experts of a layer [E, out, bytes]."""
    layer = int(name.split(".")[1])
    piece = {"w1": 0, "w3": 2, "w2": 4}[name.split(".")[-2]]
    matrices = []
    for expert in range(checkpoint.config.n_experts):
        slices = checkpoint.slice_map.slices(layer, expert)
        packed, scales = _read(slices[piece]), _read(slices[piece + 1])
        if kind in {None, "MXFP4"}:
            matrices.append(mxfp4.from_official(packed, scales))
        else:
            matrices.append(QUANTISERS[kind](fp4.dequantise(packed, scales)))
    return torch.stack(matrices)


def _rows(checkpoint: Checkpoint, name: str, kind: str | None) -> Tensor:
    """An Engram table [rows, bytes]."""
    number = checkpoint.config.engram_table(int(name.split(".")[1]))
    assert number is not None
    table = checkpoint.engram_tables[number]
    values, scales = (
        torch.frombuffer(
            bytearray(_bytes(part.shard.path, part.offset, part.n_bytes)), dtype=torch.uint8
        ).view(table.n_rows, -1)
        for part in (table.values, table.scales)
    )
    if kind is None:
        return torch.cat([values, scales], dim=1)
    return QUANTISERS[kind](fp8.dequantise_rows(values, scales))


def _read(part: Slice) -> Tensor:
    data = bytearray(_bytes(part.shard.path, part.offset, part.n_bytes))
    return torch.frombuffer(data, dtype=torch.uint8).view(part.shape)


def _bytes(path: Path, offset: int, n_bytes: int) -> bytes:
    with path.open("rb") as file:
        return os.pread(file.fileno(), n_bytes, offset)
