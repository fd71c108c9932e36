"""Dense tensors of a checkpoint, read by their byte ranges and dequantised piece by piece.

Owns the shards' descriptors while weights are loaded. Invariants: only the ranges of the tensors
asked for are read, never a byte of a routed expert or an Engram table (they lie in the same files);
beside the result itself memory holds one piece of a tensor, stored and dequantised, never a whole
one twice; after `close` no descriptor is left.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from kernels.formats import FORMATS, fp8
from protocol.errors import ShardError
from protocol.files.safetensors_index import TensorEntry

from .matrix import BF16, FP8, Matrix, StackedMatrix, StoredMatrix

# Values of one piece, a multiple of 32 rows at least: block formats need about ten times their f32.
PIECE_VALUES_CPU = 1 << 22
PIECE_VALUES_GPU = 1 << 25
_DTYPES = {
    BF16: torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    FP8: torch.uint8,
    "F8_E8M0": torch.uint8,
}
_AS_F32 = {"F32", "F16"}  # read by no kernel for matrices as they are stored


class TensorReader:
    """Reads named tensors onto one device; a context manager."""

    def __init__(self, tensors: Mapping[str, TensorEntry], device: torch.device) -> None:
        self._tensors = tensors
        self._device = device
        self._piece_values = PIECE_VALUES_CPU if device.type == "cpu" else PIECE_VALUES_GPU
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every shard."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def stored(self, name: str) -> Tensor:
        """Return a tensor as it is in the file; fp8 codes and scales as u8.

        Raises ShardError on a block format, which has no dtype.
        """
        entry = self._tensors[name]
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise ShardError(f"{entry.shard.path}: {name} is {entry.dtype}, no dense weight")
        data = self._read(entry, 0, entry.n_bytes)
        return torch.frombuffer(data, dtype=dtype).view(entry.shape).to(self._device)

    def bf16_or_f32(self, name: str) -> Tensor:
        """Return a matrix [n, k] in bf16 where it is stored so, else in f32."""
        return self.stored(name) if self._tensors[name].dtype == "BF16" else self.f32(name)

    def matrix(self, *names: str, groups: int = 1) -> Matrix:
        """Return the rows of these matrices one after the other: as stored on a GPU, else f32.

        groups  the f32 form is [groups, n / groups, k] where there are several
        """
        entries = [self._tensors[name] for name in names]
        if not _keeps_stored(self._device):
            return self._f32_matrix(names, groups)
        if _are_alike(entries):
            return self._stored_matrix(names, groups)
        assert groups == 1, "groups are of one matrix"
        return StackedMatrix(tuple(self._stored_matrix([name]) for name in names))

    def _f32_matrix(self, names: Sequence[str], groups: int) -> Tensor:
        whole = self.f32(*names)
        return whole.view(groups, -1, whole.shape[-1]) if groups > 1 else whole

    def _stored_matrix(self, names: Sequence[str], groups: int = 1) -> Tensor | StoredMatrix:
        """Return matrices that are alike; f32 where no kernel reads what is stored."""
        entries = [self._tensors[name] for name in names]
        kind, k = entries[0].dtype, entries[0].shape[1]
        if kind in _AS_F32:
            return self._f32_matrix(names, groups)
        values = torch.cat([self._rows(entry) for entry in entries])
        scales = None
        if kind == FP8:
            parts = [self.stored(f"{name.removesuffix('.weight')}.scale") for name in names]
            scales = torch.cat(parts)
        return StoredMatrix(values, scales, kind, k, groups)

    def _rows(self, entry: TensorEntry) -> Tensor:
        """Return a matrix on the device: its dtype's values, or the bytes of its blocks."""
        n_rows, k = entry.shape
        dtype = _DTYPES.get(entry.dtype, torch.uint8)
        width = k if entry.dtype in _DTYPES else entry.n_bytes // n_rows
        out = torch.empty((n_rows, width), dtype=dtype, device=self._device)
        for first, last, data in self._pieces(entry):
            out[first:last] = data.view(dtype)
        return out

    def f32(self, *names: str) -> Tensor:
        """Return the rows of these tensors one after the other, scales applied, f32.

        An fp8 matrix `X.weight` has its scales in `X.scale`, a block format among its values.
        """
        entries = [self._tensors[name] for name in names]
        n_rows = sum(entry.shape[0] for entry in entries)
        out = torch.empty((n_rows, *entries[0].shape[1:]), dtype=torch.float32, device=self._device)
        row = 0
        for entry in entries:
            try:
                self._fill(out[row : row + entry.shape[0]], entry)
            except ValueError as error:
                raise ShardError(f"{entry.shard.path}: {entry.name}: {error}") from None
            row += entry.shape[0]
        return out

    def _fill(self, out: Tensor, entry: TensorEntry) -> None:
        """Dequantise one tensor into `out`, which has its shape; ValueError on bad bytes."""
        if entry.dtype == FP8:
            scales = self.stored(entry.name.removesuffix(".weight") + ".scale")
            for first, last, data in self._pieces(entry):
                tiles = scales[first // fp8.TILE : -(-last // fp8.TILE)]
                out[first:last] = fp8.dequantise_tiles(data, tiles)
            return
        block = FORMATS.get(entry.dtype)
        if block is None:
            raise ShardError(f"{entry.shard.path}: {entry.name} is {entry.dtype}, no dense weight")
        for first, last, data in self._pieces(entry):
            out[first:last] = block.dequantise(data).view(out[first:last].shape)

    def _pieces(self, entry: TensorEntry) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (first row, last row, the rows' bytes [n, row bytes] u8 on the device)."""
        n_rows = entry.shape[0]
        row_bytes = entry.n_bytes // n_rows
        row_values = max(1, math.prod(entry.shape[1:]))
        step = max(1, self._piece_values // row_values // fp8.TILE) * fp8.TILE
        for first in range(0, n_rows, step):
            last = min(first + step, n_rows)
            data = self._read(entry, first * row_bytes, (last - first) * row_bytes)
            piece = torch.frombuffer(data, dtype=torch.uint8).view(last - first, row_bytes)
            yield first, last, piece.to(self._device)

    def _read(self, entry: TensorEntry, start: int, n_bytes: int) -> bytearray:
        descriptor = self._descriptor(entry.shard.path)
        data = bytearray(n_bytes)
        view = memoryview(data)
        done = 0
        while done < n_bytes:
            offset = entry.offset + start + done
            try:
                n = os.preadv(descriptor, [view[done:]], offset)
            except OSError as error:
                raise ShardError(f"{entry.shard.path}: {entry.name}: {error.strerror}") from None
            if n == 0:
                raise ShardError(
                    f"{entry.shard.path}: {entry.name} ends at {entry.offset + entry.n_bytes}, "
                    f"the file at {offset}"
                )
            done += n
        return data

    def _descriptor(self, path: Path) -> int:
        if path not in self._descriptors:
            try:
                self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise ShardError(f"{path}: {error.strerror}") from None
        return self._descriptors[path]


def _keeps_stored(device: torch.device) -> bool:
    return device.type != "cpu"


def _are_alike(entries: Sequence[TensorEntry]) -> bool:
    """Whether matrices can stand one below the other in the form that is kept."""
    kinds = {"F32" if entry.dtype in _AS_F32 else entry.dtype for entry in entries}
    whole_tiles = all(entry.shape[0] % fp8.TILE == 0 for entry in entries[:-1])
    return len(kinds) == 1 and (kinds != {FP8} or whole_tiles)
