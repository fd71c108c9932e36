"""A few bytes come from page-locked memory of the host, by a kernel.

A copy would queue behind those of whole experts, which have the same engine to themselves for
milliseconds; a kernel shares the way with them. And it is a launch like all others of a graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import can_be_read, runs_kernels
from .reference import bring as reference
from .tensor_checks import check_contiguous

_BLOCK = 1024


@triton.jit
def _bring_kernel(source, target, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < n), mask=at < n)


def bring(source: Tensor, target: Tensor) -> None:
    """Copy `source` to `target`.

    source  contiguous, of any integer dtype, in page-locked memory of the host or beside `target`;
            up to some KB, since every byte is waited for
    target  contiguous, of the same shape and dtype

    Bytes equal `reference.bring`. One launch, capturable; the host may write `source` again once it
    has ended. Raises ValueError on shapes, dtypes and places that differ.
    """
    if source.shape != target.shape or source.dtype != target.dtype:
        raise ValueError(
            f"bring: source {tuple(source.shape)} {source.dtype}, target {tuple(target.shape)} "
            f"{target.dtype}: wanted the same"
        )
    check_contiguous("bring", source=source, target=target)
    if not can_be_read(source, target):
        raise ValueError("bring: source must be page-locked or lie beside the target")
    if not runs_kernels(target):
        reference.bring(source, target)
        return
    n_bytes = source.numel() * source.element_size()
    word = torch.int32 if n_bytes % 4 == 0 else torch.uint8
    flat, out = (tensor.view(-1).view(torch.uint8).view(word) for tensor in (source, target))
    if n := flat.numel():
        _bring_kernel[(triton.cdiv(n, _BLOCK),)](flat, out, n, BLOCK=_BLOCK, num_warps=4)
