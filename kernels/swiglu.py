"""The gated activation of an expert that all tokens share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bf16_bits import round_to_bf16
from .device import runs_kernels
from .early_launch import early, join_previous
from .reference import swiglu as reference
from .reference.round_fp8 import round_fp8
from .round_fp8 import round_groups_to_fp8
from .tensor_checks import check_contiguous, check_tensor

_GROUPS_A_PROGRAM = 8


@triton.jit
def _swiglu_kernel(
    gate_up,
    out,
    width,
    limit,
    GROUPS: tl.constexpr,
    BF16: tl.constexpr,
    ROUNDS: tl.constexpr,
    EARLY: tl.constexpr,
):
    join_previous(EARLY)
    token = tl.program_id(1)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = at < width
    gate = tl.load(gate_up + token * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    if BF16:
        gate, up = round_to_bf16(gate), round_to_bf16(up)
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
    row = tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up
    if BF16:
        row = round_to_bf16(row)
    if ROUNDS:
        row = round_groups_to_fp8(row)
    tl.store(out + token * width + at, row, mask=inside)


def swiglu(
    gate_up: Tensor,
    limit: float,
    *,
    dtype: torch.dtype,
    rounds: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Return silu(gate) * up with both clamped, ready for the down projection.

    gate_up  [T, 2 * width] f32 or `dtype`, products that need not be rounded to it yet; width a
             multiple of 32
    limit    gate is clamped from above, up on both sides
    rounds   whether the result is rounded to fp8 as inputs of fp8 matrices are
    returns  [T, width] f32, exact in `dtype`, in `out` where given, which may be `dtype` as well

    Raises ValueError on a shape or dtype that differs. Before the roundings within 1e-6 (relative)
    of `reference.swiglu`. Source: model specification, sections 2.2 and 3.7, Expert.
    """
    n_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    kinds = {torch.float32, dtype}
    if gate_up.dtype not in kinds or gate_up.shape[1] % 64:
        raise ValueError(
            f"swiglu: gate_up is {gate_up.dtype} {tuple(gate_up.shape)}, wanted f32 [T, 64 n]"
        )
    if out is None:
        out = torch.empty((n_tokens, width), dtype=torch.float32, device=gate_up.device)
    check_contiguous("swiglu", gate_up=gate_up)
    check_tensor("swiglu", "out", out, (n_tokens, width), torch.float32, dtype)
    if not runs_kernels(gate_up):
        gate, up = gate_up.to(dtype).chunk(2, dim=1)
        row = reference.swiglu(gate, up, limit, None).to(dtype)
        return out.copy_(round_fp8(row) if rounds else row)
    if n_tokens:
        grid = (triton.cdiv(width // 32, _GROUPS_A_PROGRAM), n_tokens)
        _swiglu_kernel[grid](
            gate_up, out, width, limit, GROUPS=_GROUPS_A_PROGRAM,
            BF16=dtype == torch.bfloat16, ROUNDS=rounds, num_warps=2, **early(gate_up.device),
        )  # fmt: skip
    return out
