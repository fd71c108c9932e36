"""A row rounded to fp8, kept as whole numbers cut into bytes, for exact products with fp4 codes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import runs_kernels
from .early_launch import early, join_previous
from .reference import byte_planes as reference
from .tensor_checks import check_contiguous, check_tensor

Planes = tuple[Tensor, Tensor, Tensor]

_GROUPS_A_PROGRAM = 4
_UNITS = tl.constexpr(512)
_BIAS = tl.constexpr(192)
_RECIPROCAL = tl.constexpr(0.0022321429569274187)  # 1 / 448 as f32, part of the definition


@triton.jit
def store_byte_planes(v, planes, offsets, scales, group, n_groups):
    """Round groups v [G, 8, 4] f32 to fp8 and store the byte planes of one row.

    group  [G] i32, the groups' numbers in the row; those from n_groups on are not stored
    """
    mask = group < n_groups
    half, byte = tl.arange(0, 8), tl.arange(0, 4)
    # As whole numbers NaN is above all others; a float maximum drops it.
    largest = tl.max(tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2), 1)
    is_finite = largest < 0x7F800000
    v = tl.where(is_finite[:, None, None], v, 0.0)
    amax = tl.where(is_finite, largest, 0).to(tl.float32, bitcast=True)
    amax = tl.maximum(amax, 1e-4) * _RECIPROCAL
    bits = (amax.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000
    # A power of two's reciprocal is exact: 2^-(e - 127) has exponent field 254 - e.
    inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    scaled = tl.minimum(tl.maximum(v * inverse[:, None, None], -448.0), 448.0)
    binade = (scaled.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # Added and taken away again, 1.5 * 2^20 binades leave three mantissa bits below the binade.
    magic = tl.maximum(binade, 0.015625) * 1572864.0
    whole = (((scaled + magic) - magic) * _UNITS).to(tl.int32)
    total = tl.sum(tl.sum(whole, 2), 1)
    out = planes + (half % 2)[None, :] * n_groups * 4 + group[:, None] * 4 + (half // 2)[None, :]
    for plane in tl.static_range(3):
        packed = tl.sum(((whole >> (8 * plane)) & 255) << (8 * byte)[None, None, :], 2)
        tl.store(out + plane * n_groups * 8, packed, mask=mask[:, None])
    tl.store(offsets + group, total * -_BIAS, mask=mask)
    scale = bits.to(tl.float32, bitcast=True) * (1.0 / (2 * _UNITS))
    scale = tl.where(is_finite, scale.to(tl.int32, bitcast=True), 0x7FC00000)
    scale = scale.to(tl.float32, bitcast=True)
    tl.store(scales + group, scale, mask=mask)


@triton.jit
def _byte_planes_kernel(
    x, planes, offsets, scales, n_groups, GROUPS: tl.constexpr, EARLY: tl.constexpr
):
    join_previous(EARLY)
    row = tl.program_id(1)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    half, byte = tl.arange(0, 8), tl.arange(0, 4)
    within = half[:, None] * 4 + byte[None, :]
    at = row * n_groups * 32 + group[:, None, None] * 32 + within[None, :, :]
    v = tl.load(x + at, mask=(group < n_groups)[:, None, None], other=0.0).to(tl.float32)
    skip = row * n_groups
    store_byte_planes(v, planes + skip * 24, offsets + skip, scales + skip, group, n_groups)


def byte_planes(x: Tensor, *, out: Planes | None = None) -> Planes:
    """Round groups of 32 values to fp8 and cut each value's multiple of 2^-9 into bytes.

    x        [T, k] bf16 or f32, contiguous, k a multiple of 32
    returns  planes [T, 3, 2, k / 8] i32, offsets [T, k / 32] i32, scales [T, k / 32] f32,
             as `reference.byte_planes` describes; in `out` where given

    Raises ValueError on a shape or dtype that differs. Bits equal `reference.byte_planes`.
    Source: model specification, section 2.2, ROUND_FP8; the planes are ours.
    """
    if x.dim() != 2 or x.shape[1] % 32 or x.dtype not in {torch.bfloat16, torch.float32}:
        raise ValueError(f"byte_planes: x is {x.dtype} {tuple(x.shape)}, wanted [T, 32 n] floats")
    check_contiguous("byte_planes", x=x)
    rows, k = x.shape
    n_groups = k // 32
    if out is not None:
        check_planes("byte_planes", "out", out, rows, k)
    if not runs_kernels(x):
        return _filled(reference.byte_planes(x), out)
    planes, offsets, scales = empty_planes(rows, k, x.device) if out is None else out
    if rows:
        grid = (triton.cdiv(n_groups, _GROUPS_A_PROGRAM), rows)
        _byte_planes_kernel[grid](
            x,
            planes,
            offsets,
            scales,
            n_groups,
            GROUPS=_GROUPS_A_PROGRAM,
            num_warps=1,
            **early(x.device),
        )
    return planes, offsets, scales


def empty_planes(rows: int, k: int, device: torch.device) -> Planes:
    """Return unwritten planes, offsets and scales for `rows` rows of k values."""
    planes = torch.empty((rows, 3, 2, k // 8), dtype=torch.int32, device=device)
    offsets = torch.empty((rows, k // 32), dtype=torch.int32, device=device)
    scales = torch.empty((rows, k // 32), dtype=torch.float32, device=device)
    return planes, offsets, scales


def check_planes(launcher: str, name: str, planes: Planes, rows: int, k: int) -> None:
    """Raise ValueError unless planes, offsets and scales are those of `rows` rows of k values."""
    parts, offsets, scales = planes
    check_tensor(launcher, f"{name}[0]", parts, (rows, 3, 2, k // 8), torch.int32)
    check_tensor(launcher, f"{name}[1]", offsets, (rows, k // 32), torch.int32)
    check_tensor(launcher, f"{name}[2]", scales, (rows, k // 32), torch.float32)


def _filled(found: Planes, out: Planes | None) -> Planes:
    if out is None:
        return found
    for target, part in zip(out, found, strict=True):
        target.copy_(part)
    return out
