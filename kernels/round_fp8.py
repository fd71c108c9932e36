"""Values rounded to fp8 in groups of 32, and scaled back."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bf16_bits import round_to_bf16
from .device import runs_kernels
from .early_launch import early, join_previous
from .reference import round_fp8 as reference
from .tensor_checks import check_contiguous, check_tensor

GROUP = 32
_GROUPS_A_PROGRAM = 8
_FLOOR_BITS = tl.constexpr(0x38D1B717)  # 1e-4 as f32
_RECIPROCAL = tl.constexpr(0.0022321429569274187)  # 1 / 448 as f32, part of the definition


@triton.jit
def round_groups_to_fp8(v):
    """Return v f32 [..., 32] on the E4M3 grid of its group's scale, in f32: `round_fp8`'s values.

    The last axis is one group. Infinities and NaN come out as they do from the reference.
    """
    bits = v.to(tl.int32, bitcast=True)
    # As whole numbers NaN is above all others: it reaches the scale, as a float maximum drops it.
    largest = tl.max(bits & 0x7FFFFFFF, len(v.shape) - 1, keep_dims=True)
    amax = tl.maximum(largest, _FLOOR_BITS).to(tl.float32, bitcast=True)
    step = (amax * _RECIPROCAL).to(tl.int32, bitcast=True)
    scale = ((step + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    scaled = v * tl.div_rn(1.0, scale)  # a power of two: exact
    clamped = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
    clamped = tl.where(scaled == scaled, clamped, scaled)  # noqa: PLR0124  NaN stays
    binade = (clamped.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # Added and taken away again, 1.5 * 2^20 binades leave three mantissa bits below the binade.
    magic = tl.maximum(binade, 0.015625) * 1572864.0
    code = ((clamped + magic) - magic).to(tl.int32, bitcast=True)
    code = (code & 0x7FFFFFFF) | (bits & -2147483648)  # zero keeps its sign
    return code.to(tl.float32, bitcast=True) * scale


@triton.jit
def _round_fp8_kernel(
    x,
    out,
    n_groups,
    GROUPS: tl.constexpr,
    BF16: tl.constexpr,
    EARLY: tl.constexpr,
):
    join_previous(EARLY)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    at = group.to(tl.int64)[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = (group < n_groups)[:, None]
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if BF16:
        v = round_to_bf16(v)
    tl.store(out + at, round_groups_to_fp8(v), mask=inside)


def round_fp8(x: Tensor, *, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
    """Round groups of 32 channels to E4M3 with a power-of-two scale, and scale back.

    x        [T, k] bf16 or f32, contiguous, k a multiple of 32
    dtype    what x is rounded to before: bf16 or f32; None: it is taken as it is
    returns  [T, k] f32, each value exact in bf16, in `out` where given, which may be bf16

    Raises ValueError on a shape or dtype that differs. Bits equal `reference.round_fp8`.
    Source: model specification, section 2.2, ROUND_FP8.
    """
    if x.dim() != 2 or x.shape[1] % GROUP or x.dtype not in {torch.bfloat16, torch.float32}:
        raise ValueError(f"round_fp8: x is {x.dtype} {tuple(x.shape)}, wanted [T, 32 n] floats")
    check_contiguous("round_fp8", x=x)
    if out is None:
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    check_tensor("round_fp8", "out", out, x.shape, torch.float32, torch.bfloat16)
    if not runs_kernels(x):
        return out.copy_(reference.round_fp8(x.to(dtype or x.dtype)))
    n_groups = x.numel() // GROUP
    if n_groups:
        grid = (triton.cdiv(n_groups, _GROUPS_A_PROGRAM),)
        _round_fp8_kernel[grid](
            x,
            out,
            n_groups,
            GROUPS=_GROUPS_A_PROGRAM,
            BF16=dtype == torch.bfloat16,
            num_warps=2,
            **early(x.device),
        )
    return out
