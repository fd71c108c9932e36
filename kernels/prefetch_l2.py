"""Bytes on their way into a GPU's second-level cache before a kernel asks for them.

While small kernels compute, the memory stands idle: it fetches what the next large matrix product
will read. Nothing waits for it and nothing depends on it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import interpreted

_CHUNK = 16384  # bytes that one lane asks for
_LANES = 32


@triton.jit
def _prefetch_l2_kernel(data, n_bytes, CHUNK: tl.constexpr, LANES: tl.constexpr):
    at = (tl.program_id(0) * LANES + tl.arange(0, LANES)).to(tl.int64) * CHUNK
    size = tl.minimum(n_bytes - at, CHUNK).to(tl.int32)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r",
        [data.to(tl.int64) + at, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def prefetch_l2(data: Tensor, first: int = 0, n_bytes: int | None = None) -> None:
    """Ask for bytes of a contiguous tensor; returns when they are asked for.

    first    byte to begin with, a multiple of 16
    n_bytes  how many; None: to the end

    Does nothing where the device has no such instruction (compute capability below 9.0) and on the
    CPU. Raises ValueError on a range that is not whole 16-byte units of the tensor.
    """
    whole = data.numel() * data.element_size() // 16 * 16
    n_bytes = whole - first if n_bytes is None else n_bytes
    if first % 16 or n_bytes % 16 or not 0 <= first <= first + n_bytes <= whole:
        raise ValueError(f"prefetch_l2: bytes {first} to {first + n_bytes} of {whole}")
    if not data.is_contiguous():
        raise ValueError("prefetch_l2: the tensor is not contiguous")
    if n_bytes and _can_prefetch(data.device):
        flat = data.view(-1).view(torch.uint8)[first:]
        grid = (triton.cdiv(n_bytes, _CHUNK * _LANES),)
        _prefetch_l2_kernel[grid](flat, n_bytes, CHUNK=_CHUNK, LANES=_LANES, num_warps=1)


@lru_cache(maxsize=16)
def _can_prefetch(device: torch.device) -> bool:
    if device.type != "cuda" or interpreted():
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
