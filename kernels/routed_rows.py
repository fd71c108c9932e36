"""The routed experts of many rows, a part for each pair of token and expert.

Invariants: pairs are sorted by expert, then token; a part depends on its token, its expert and the
weight alone, not on which pairs share a launch; an address of 0 marks an absent expert, of which
nothing is read. `sum_parts` adds the parts afterwards, so that experts may come a few at a time.
Kernels for fp4 on Hopper's tensor cores are in `routed_rows_layouts.py`, those for GGUF blocks in
`routed_rows_blocks.py`, here are the plain ones for fp4.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import has_warpgroup_products, runs_kernels
from .formats.fp4_expert import Fp4Shape
from .formats.k_expert import BlockShape
from .reference import routed_rows as reference
from .round_fp8 import round_fp8
from .routed_m1_blocks import check_blocks
from .routed_m1_swiglu import gated, rounded
from .tensor_checks import check_contiguous, check_tensor

_PAIRS, _ROWS = 16, 32  # of a plain program


@triton.jit
def _fp4_value(code):
    size = (code & 7).to(tl.int32)
    doubled = tl.where(size < 4, size, (2 + (size & 1)) << tl.maximum((size >> 1) - 1, 0))
    return tl.where(code > 7, -doubled, doubled).to(tl.float32) * 0.5


@triton.jit
def _plain_products(
    at, scales_at, x, source, inside, row, GROUPS: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Return [len(source), len(row)] f32: rows of x times rows of an fp4 matrix."""
    matrix = at.to(tl.pointer_type(tl.uint8))
    scales = scales_at.to(tl.pointer_type(tl.uint8))
    total = tl.zeros([source.shape[0], row.shape[0]], tl.float32)
    byte = tl.arange(0, 16)
    stored = row < N
    for group in range(GROUPS):
        within = row[None, :] * (GROUPS * 16) + group * 16 + byte[:, None]
        pair = tl.load(matrix + within, mask=stored[None, :], other=0)
        code = tl.load(scales + row * GROUPS + group, mask=stored, other=0).to(tl.int32)
        scale = tl.where(code == 0, 0x00400000, code << 23).to(tl.float32, bitcast=True)[None, :]
        x_at = x + source[:, None] * (GROUPS * 32) + (group * 32 + 2 * byte)[None, :]
        even = tl.load(x_at, mask=inside[:, None], other=0.0)
        odd = tl.load(x_at + 1, mask=inside[:, None], other=0.0)
        total += tl.dot(even, _fp4_value(pair & 15) * scale, input_precision="ieee")
        total += tl.dot(odd, _fp4_value(pair >> 4) * scale, input_precision="ieee")
    return total


@triton.jit
def _gate_up_kernel(
    x,
    tokens,
    weights,
    tiles,
    pointers,
    activated,
    n_groups,
    limit,
    GATE_SCALE: tl.constexpr,
    UP_SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    BF16: tl.constexpr,
):
    tile = tiles + tl.program_id(1) * 3
    group, start, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    gate_at, up_at = tl.load(pointers + group), tl.load(pointers + n_groups + group)
    if gate_at == 0:
        return
    pair = tl.arange(0, PAIRS)
    inside = pair < count
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    source = tl.load(tokens + start + pair, mask=inside, other=0).to(tl.int64)
    gate = _plain_products(gate_at, gate_at + GATE_SCALE, x, source, inside, row, GROUPS, WIDTH)
    up = _plain_products(up_at, up_at + UP_SCALE, x, source, inside, row, GROUPS, WIDTH)
    weight = tl.load(weights + start + pair, mask=inside, other=0.0)[:, None]
    at = (start + pair).to(tl.int64)[:, None] * WIDTH + row[None, :]
    mask = inside[:, None] & (row < WIDTH)[None, :]
    tl.store(activated + at, gated(gate, up, weight, limit, BF16), mask=mask)


@triton.jit
def _down_kernel(
    x,
    tiles,
    pointers,
    parts,
    n_groups,
    DOWN_SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    HIDDEN: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    BF16: tl.constexpr,
):
    tile = tiles + tl.program_id(1) * 3
    group, start, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    at = tl.load(pointers + 2 * n_groups + group)
    pair = tl.arange(0, PAIRS)
    inside = pair < count
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    source = (start + pair).to(tl.int64)
    out = parts + source[:, None] * HIDDEN + row[None, :]
    mask = inside[:, None] & (row < HIDDEN)[None, :]
    if at == 0:
        tl.store(out, tl.zeros([PAIRS, ROWS], tl.float32), mask=mask)
        return
    y = _plain_products(at, at + DOWN_SCALE, x, source, inside, row, GROUPS, HIDDEN)
    tl.store(out, rounded(y, BF16), mask=mask)


def routed_rows(
    x: Tensor,
    tokens: Tensor,
    weights: Tensor,
    starts: Sequence[int],
    pointers: Tensor,
    shape: Fp4Shape | BlockShape,
    limit: float,
    *,
    dtype: torch.dtype = torch.bfloat16,
    plain: bool = False,
    parts: Tensor | None = None,
) -> Tensor:
    """Return each pair's w2(weight * act(w1 x, w3 x)).

    x         [T, hidden] bf16 or f32, contiguous
    tokens    [R] i32, the row of x of each pair, in whatever order within a group
    weights   [R] f32 routing weights
    starts    G + 1 whole numbers: pairs starts[g] .. starts[g + 1] - 1 are of group g's expert;
              on the host, which knows them, since it asked for the experts
    pointers  [3, G] i64 addresses of gate, up and down; 0 for an absent expert
    shape     how an expert lies: fp4, or rows of GGUF blocks in formats of `gemm_blocks.FORMS`
    dtype     what each product is rounded to: bf16 or f32
    plain     takes fp4's bodies without tensor cores on any GPU, and those for blocks without
              inline PTX, for comparison
    returns   [R, hidden] `dtype`, in `parts` where given; zeros for absent experts

    Rows are rounded before each product: to fp8 for fp4, else to tiled blocks (`tiled_rows.py`).
    Blocks want a GPU with byte products (`device.has_byte_products`).
    Addresses are multiples of 16. Raises ValueError on a shape, dtype or format that differs.
    Each product is within 2e-6 (relative, f32) of the reference's; what lies near a tie of the
    inner row's rounding moves by a step of that, so the whole is within 2e-3 (relative to a row's
    norm) of `reference.routed_rows`, 3e-3 for blocks. On tensor cores scales are taken from
    2^-116 to 2^17, others as the nearest of these. Source: model specification, section 3.7.
    """
    _check(x, tokens, weights, starts, pointers, shape)
    n_pairs = tokens.shape[0]
    if parts is None:
        parts = torch.empty((n_pairs, shape.hidden), dtype=dtype, device=x.device)
    check_tensor("routed_rows", "parts", parts, (n_pairs, shape.hidden), dtype)
    if not runs_kernels(x):
        return parts.copy_(
            reference.routed_rows(x, tokens, weights, starts, pointers, shape, limit, dtype)
        )
    if n_pairs == 0:
        return parts
    if isinstance(shape, BlockShape):
        from .routed_rows_blocks import launch_blocks  # noqa: PLC0415  imports this module

        launch_blocks(x, tokens, weights, starts, pointers, parts, shape, limit, plain=plain)
    elif has_warpgroup_products(x.device) and not plain:
        from .routed_rows_layouts import launch_layouts  # noqa: PLC0415  wants a GPU's compiler

        launch_layouts(x, tokens, weights, starts, pointers, parts, shape, limit)
    else:
        _launch_plain(x, tokens, weights, starts, pointers, parts, shape, limit)
    return parts


def tiles_of(starts: Sequence[int], sizes: Sequence[int]) -> dict[int, list[tuple[int, int, int]]]:
    """Return tiles (group, first pair, pairs) by their size, the largest size first.

    A group is cut into tiles of the largest of `sizes`, which ascend; its rest takes the smallest
    that holds it.
    """
    tiles: dict[int, list[tuple[int, int, int]]] = {size: [] for size in reversed(sizes)}
    for group, (first, end) in enumerate(pairwise(starts)):
        for start in range(first, end, sizes[-1]):
            count = min(sizes[-1], end - start)
            size = next(size for size in sizes if size >= count)
            tiles[size].append((group, start, count))
    return {size: found for size, found in tiles.items() if found}


def device_tiles(
    starts: Sequence[int], sizes: Sequence[int], device: torch.device
) -> dict[int, Tensor]:
    """Return the tiles [n, 3] i32 of each size, brought over without waiting for the device."""
    by_size = tiles_of(starts, sizes)
    every = [tile for tiles in by_size.values() for tile in tiles]
    host = torch.tensor(every, dtype=torch.int32)
    if device.type == "cuda":
        host = host.pin_memory().to(device, non_blocking=True)
    parts = host.split([len(tiles) for tiles in by_size.values()])
    return dict(zip(by_size, parts, strict=True))


def _launch_plain(
    x: Tensor,
    tokens: Tensor,
    weights: Tensor,
    starts: Sequence[int],
    pointers: Tensor,
    parts: Tensor,
    shape: Fp4Shape,
    limit: float,
) -> None:
    n_groups, bf16 = pointers.shape[1], parts.dtype == torch.bfloat16
    tiles = device_tiles(starts, [_PAIRS], x.device)[_PAIRS]
    activated = torch.empty((len(tokens), shape.width), dtype=torch.float32, device=x.device)
    _gate_up_kernel[triton.cdiv(shape.width, _ROWS), len(tiles)](
        round_fp8(x), tokens, weights, tiles, pointers, activated, n_groups, limit,
        GATE_SCALE=shape.gate_scale, UP_SCALE=shape.up_scale, GROUPS=shape.hidden // 32,
        WIDTH=shape.width, PAIRS=_PAIRS, ROWS=_ROWS, BF16=bf16,
    )  # fmt: skip
    _down_kernel[triton.cdiv(shape.hidden, _ROWS), len(tiles)](
        round_fp8(activated), tiles, pointers, parts, n_groups,
        DOWN_SCALE=shape.down_scale, GROUPS=shape.width // 32, HIDDEN=shape.hidden,
        PAIRS=_PAIRS, ROWS=_ROWS, BF16=bf16,
    )  # fmt: skip


def _check(
    x: Tensor,
    tokens: Tensor,
    weights: Tensor,
    starts: Sequence[int],
    pointers: Tensor,
    shape: Fp4Shape | BlockShape,
) -> None:
    if x.dim() != 2 or x.shape[1] != shape.hidden:
        raise ValueError(f"routed_rows: x is {tuple(x.shape)}, wanted [T, {shape.hidden}]")
    if isinstance(shape, BlockShape):
        check_blocks(shape)
    elif shape.hidden % 32 or shape.width % 32:
        raise ValueError(f"routed_rows: {shape.hidden} x {shape.width} are no multiples of 32")
    n_groups, n_pairs = len(starts) - 1, tokens.shape[0]
    if pointers.dtype != torch.int64 or tuple(pointers.shape) != (3, n_groups):
        raise ValueError(
            f"routed_rows: pointers are {pointers.dtype} {tuple(pointers.shape)}, "
            f"wanted int64 {(3, n_groups)}"
        )
    rising = all(first <= end for first, end in pairwise(starts))
    if not rising or (starts[0], starts[-1]) != (0, n_pairs):
        raise ValueError(f"routed_rows: starts do not rise from 0 to {n_pairs}")
    if tokens.dtype != torch.int32 or weights.dtype != torch.float32:
        raise ValueError("routed_rows: tokens are int32, weights f32")
    if tuple(weights.shape) != (n_pairs,):
        raise ValueError(f"routed_rows: {tuple(weights.shape)} weights of {n_pairs} pairs")
    check_contiguous("routed_rows", x=x, tokens=tokens, weights=weights, pointers=pointers)
