"""A router's logits: products of a token's row and a router's matrix, added one after another.

Invariants: each logit is one chain of f32 additions in ascending order of the channel, beginning at
+0, of products that were rounded first: nothing is fused, and nothing is summed beside it. So every
body gives the same bits, and a token's do not depend on how many there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import runs_kernels, speaks_ptx
from .reference import router_logits as reference
from .tensor_checks import check_tensor

FEW_ROWS = 48  # up to here a chain of a thread's own, its products made beforehand, is quicker
# Tokens and experts of a program, by the rows up to which it is the quickest: measured, see
# bench/NOTES.md. A warp holds a few chains a thread, so that others' additions fill its waits.
TILES = ((192, (8, 8)), (384, (8, 16)), (1024, (16, 16)), (1 << 62, (16, 32)))


@triton.jit
def _eight(v, ROWS: tl.constexpr):
    """Return the columns of v [ROWS, 8] in their order."""
    even, odd = tl.split(tl.reshape(v, [ROWS, 2, 2, 2]))
    v04, v26 = tl.split(even)
    v15, v37 = tl.split(odd)
    v0, v4 = tl.split(v04)
    v1, v5 = tl.split(v15)
    v2, v6 = tl.split(v26)
    v3, v7 = tl.split(v37)
    return v0, v1, v2, v3, v4, v5, v6, v7


@triton.jit
def _router_logits_kernel(
    x,
    weight,
    out,
    m,
    n,
    k,
    stride,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    xs = x + token.to(tl.int64)[:, None] * stride
    ws = weight + row.to(tl.int64)[:, None] * k
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    for start in range(0, k, 8):
        at = start + tl.arange(0, 8)
        inside = (at < k)[None, :]
        # Beyond the last channel +0 is added, which changes no sum that began at +0.
        v = tl.load(xs + at[None, :], mask=(token < m)[:, None] & inside, other=0.0)
        w = tl.load(ws + at[None, :], mask=(row < n)[:, None] & inside, other=0.0)
        v0, v1, v2, v3, v4, v5, v6, v7 = _eight(v.to(tl.float32), TOKENS)
        w0, w1, w2, w3, w4, w5, w6, w7 = _eight(w.to(tl.float32), ROWS)
        total += v0[:, None] * w0[None, :]
        total += v1[:, None] * w1[None, :]
        total += v2[:, None] * w2[None, :]
        total += v3[:, None] * w3[None, :]
        total += v4[:, None] * w4[None, :]
        total += v5[:, None] * w5[None, :]
        total += v6[:, None] * w6[None, :]
        total += v7[:, None] * w7[None, :]
    at = token.to(tl.int64)[:, None] * n + row[None, :]
    tl.store(out + at, total, mask=(token < m)[:, None] & (row < n)[None, :])


def router_logits(
    x: Tensor, weight: Tensor, *, plain: bool = False, out: Tensor | None = None
) -> Tensor:
    """Return a router's logits x . weight^T, each product rounded, then added in order.

    x        [T, H] f32 or bf16, rows contiguous
    weight   [E, H] bf16 or f32, contiguous, not written by the launch before: a kernel may read it
             while that still runs
    plain    takes the body without explicit layouts for few rows on a GPU too, for comparison
    returns  [T, E] f32, in `out` where given: then f32 rows allocate nothing

    Raises ValueError on a shape or dtype that differs. Bits equal `reference.router_logits` but for
    the payload of a NaN. Source: model specification, section 4.3, router detail.
    """
    _check(x, weight)
    shape = (x.shape[0], weight.shape[0])
    if out is None:
        out = torch.empty(shape, dtype=torch.float32, device=x.device)
    check_tensor("router_logits", "out", out, shape, torch.float32)
    if not runs_kernels(x):
        return out.copy_(reference.router_logits(x, weight))
    if 0 in shape:
        return out
    if shape[0] <= FEW_ROWS and speaks_ptx(x.device) and not plain:
        from .router_logits_layouts import fits, launch_layouts  # noqa: PLC0415  a GPU's compiler

        if fits(weight):
            launch_layouts(x, weight, out)
            return out
    tokens, rows = next(tile for most, tile in TILES if shape[0] <= most)
    _router_logits_kernel[(triton.cdiv(shape[1], rows), triton.cdiv(shape[0], tokens))](
        x, weight, out, *shape, x.shape[1], x.stride(0),
        TOKENS=tokens, ROWS=rows, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _check(x: Tensor, weight: Tensor) -> None:
    kinds = (torch.float32, torch.bfloat16)
    if weight.dtype not in kinds or weight.dim() != 2 or not weight.is_contiguous():
        raise ValueError(
            f"router_logits: weight is {weight.dtype} {tuple(weight.shape)}, wanted bf16 or f32 "
            "[E, H], contiguous"
        )
    if x.dtype not in kinds or x.dim() != 2 or x.shape[1] != weight.shape[1] or x.stride(1) != 1:
        raise ValueError(
            f"router_logits: x is {x.dtype} {tuple(x.shape)}, wanted f32 or bf16 "
            f"[T, {weight.shape[1]}], rows contiguous"
        )
