"""Cut rows into blocks, read and write a block's fields, and quantise many blocks at a time.

Invariants: a block's bytes depend on its own values alone, never on how many blocks are handled in
one call or on which device, so `fold` adds in a fixed order and nothing here uses a library sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Blocks in one piece: on the CPU what stays in the cache, on a GPU what fills it.
PIECE_VALUES_CPU = 1 << 17
PIECE_VALUES_GPU = 1 << 23
F16_MAX = 65504.0


def as_blocks(data: Tensor, block_bytes: int, name: str) -> Tensor:
    """View bytes [..., n * block_bytes] u8 as [..., n, block_bytes]; ValueError if they are not."""
    if data.dtype != torch.uint8:
        raise ValueError(f"{name}: blocks are uint8, got {data.dtype}")
    if data.ndim == 0 or data.shape[-1] % block_bytes:
        raise ValueError(
            f"{name}: a row is a multiple of {block_bytes} bytes, got shape {tuple(data.shape)}"
        )
    return apart(data, data.shape[-1] // block_bytes, block_bytes)


def apart(values: Tensor, *sizes: int) -> Tensor:
    """The last dimension taken apart into `sizes`."""
    return values.reshape(*values.shape[:-1], *sizes)


def read_as(field: Tensor, dtype: torch.dtype) -> Tensor:
    """Fields [..., n * size] u8 as [..., n] of a little-endian `dtype`, wherever they lie."""
    field = field.contiguous()
    if field.storage_offset() % dtype.itemsize:
        field = field.clone()
    return field.view(dtype)


def read_f16(field: Tensor) -> Tensor:
    """Float16 fields [..., 2] u8 as [..., 1] f32."""
    return read_as(field, torch.float16).float()


def write_f16(values: Tensor) -> Tensor:
    """Values [..., ] f32 as float16 fields [..., 2] u8, round to nearest even."""
    return values.to(torch.float16).unsqueeze(-1).view(torch.uint8)


def round_f16(values: Tensor) -> Tensor:
    """The f32 values that `write_f16` keeps: the nearest float16, at most 65504 in magnitude."""
    return values.clamp(-F16_MAX, F16_MAX).to(torch.float16).float()


def shifts(*bits: int, device: torch.device) -> Tensor:
    """Shift counts [n, 1] u8 that take a byte's fields apart along a new dimension."""
    return torch.tensor(bits, dtype=torch.uint8, device=device).unsqueeze(-1)


def divide(values: Tensor, number: float) -> Tensor:
    """Each value divided by a number, rounded once.

    Divided by a Python number, a GPU multiplies by its reciprocal instead and rounds twice.
    """
    return values / torch.full((), number, dtype=values.dtype, device=values.device)


def fold(values: Tensor) -> Tensor:
    """Sum over dimension 0 (a power of two), halves added pairwise: the same bits everywhere."""
    n = values.shape[0]
    assert n & (n - 1) == 0
    while n > 1:
        n //= 2
        values = values[:n] + values[n:]
    return values[0]


def by_pieces(
    values: Tensor,
    block_values: int,
    block_bytes: int,
    name: str,
    largest: float,
    encode: Callable[[Tensor], Tensor],
) -> Tensor:
    """Quantise rows [..., n * block_values] to [..., n * block_bytes] u8, many blocks at a time.

    `encode` takes [n_blocks, block_values] f32 and returns [n_blocks, block_bytes] u8.
    Raises ValueError on a length that is no multiple of a block, and on values that are not finite
    or, in magnitude, above `largest`.
    """
    if not values.is_floating_point():
        raise ValueError(f"{name}: values are floating point, got {values.dtype}")
    if values.ndim == 0 or values.shape[-1] % block_values:
        raise ValueError(
            f"{name}: a row is a multiple of {block_values} values, got shape {tuple(values.shape)}"
        )
    n = values.shape[-1] // block_values
    shape = (*values.shape[:-1], n * block_bytes)
    blocks = values.reshape(-1, block_values)
    out = torch.empty((blocks.shape[0], block_bytes), dtype=torch.uint8, device=values.device)
    piece = (PIECE_VALUES_GPU if values.is_cuda else PIECE_VALUES_CPU) // block_values
    for first in range(0, blocks.shape[0], piece):
        part = blocks[first : first + piece].float()
        # Written so that a NaN, which compares as false, is refused too.
        if not bool(part.abs().amax() <= min(largest, torch.finfo(torch.float32).max)):
            raise ValueError(f"{name}: a value is not finite, or above {largest:g}")
        out[first : first + piece] = encode(part)
    return out.view(shape)
