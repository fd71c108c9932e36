"""Dense tensors of a checkpoint, read by their byte ranges.

Owns the shards' descriptors while weights are loaded. Invariants: only the ranges of the tensors
asked for are read, never a byte of a routed expert or an Engram table (they lie in the same files),
and after `close` no descriptor is left.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from kernels.formats import fp8
from protocol.errors import ShardError
from protocol.files.safetensors_index import TensorEntry

_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.uint8,
    "F8_E8M0": torch.uint8,
}


class TensorReader:
    """Reads named tensors onto one device; a context manager."""

    def __init__(self, tensors: Mapping[str, TensorEntry], device: torch.device) -> None:
        self._tensors = tensors
        self._device = device
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
        """Return a tensor as it is in the file; fp8 codes and scales as u8."""
        entry = self._tensors[name]
        data = self._read(entry)
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise ShardError(f"{entry.shard.path}: {name} is {entry.dtype}, no dense weight")
        return torch.frombuffer(data, dtype=dtype).view(entry.shape).to(self._device)

    def f32(self, name: str) -> Tensor:
        """Return a bf16 or f32 tensor as f32."""
        return self.stored(name).float()

    def fp8(self, name: str) -> Tensor:
        """Return the matrix `name`.weight with its scales applied, f32."""
        codes, scales = self.stored(f"{name}.weight"), self.stored(f"{name}.scale")
        try:
            return fp8.dequantise_tiles(codes, scales)
        except ValueError as error:
            path = self._tensors[f"{name}.scale"].shard.path
            raise ShardError(f"{path}: {name}: {error}") from None

    def _read(self, entry: TensorEntry) -> bytearray:
        descriptor = self._descriptor(entry.shard.path)
        data = bytearray(entry.n_bytes)
        view = memoryview(data)
        done = 0
        while done < entry.n_bytes:
            try:
                n = os.preadv(descriptor, [view[done:]], entry.offset + done)
            except OSError as error:
                raise ShardError(f"{entry.shard.path}: {entry.name}: {error.strerror}") from None
            if n == 0:
                raise ShardError(
                    f"{entry.shard.path}: {entry.name} ends at {entry.offset + entry.n_bytes}, "
                    f"the file at {entry.offset + done}"
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
