"""The routed experts of many rows over GGUF blocks, on tensor cores of whole numbers.

Invariants as in `routed_rows.py`, but that rows are rounded to tiled blocks instead of fp8: D2S6
where they meet Q2_K, D4 elsewhere. Matrices are read as they lie in their slots, each by as many
programs as its group has tiles of pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .block_tiles import block_products
from .block_words import UNITS
from .device import speaks_ptx
from .formats.k_expert import BlockShape
from .reference.gemm_blocks import FORMS
from .reference.tiled_rows import TiledRows
from .routed_m1_blocks import row_bytes
from .routed_m1_swiglu import gated, rounded
from .routed_rows import device_tiles
from .tiled_rows import tiled_rows

PAIRS = (16, 32, 64)  # a tile: a group's rest takes the smallest that holds it
# By the pairs of a tile: rows of a matrix, warps, copies in flight, registers (0: as many as it
# takes).
ROWS = {16: 64, 32: 64, 64: 64}
WARPS = {16: 4, 32: 4, 64: 4}
STAGES = {16: 2, 32: 2, 64: 2}
REGISTERS = {16: 0, 32: 0, 64: 0}


# Parts of tensors come, at any place: each alignment would be compiled anew.
@triton.jit(do_not_specialize=["n_groups"], do_not_specialize_on_alignment=["tiles", "weights"])
def _block_rows_gate_up_kernel(
    gate_codes, gate_scales, gate_sums, up_codes, up_scales, up_sums,
    weights, tiles, pointers, activated, n_groups, limit,
    GATE: tl.constexpr, UP: tl.constexpr, GATE_BYTES: tl.constexpr, UP_BYTES: tl.constexpr,
    GATE_ROW: tl.constexpr, UP_ROW: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, BF16: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(1) * 3
    group, start, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    gate_at, up_at = tl.load(pointers + group), tl.load(pointers + n_groups + group)
    pair = tl.arange(0, PAIRS)
    inside = pair < count
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    out = activated + (start + pair).to(tl.int64)[None, :] * WIDTH + row[:, None]
    mask = inside[None, :] & (row < WIDTH)[:, None]
    if gate_at == 0:  # rows are rounded next, whatever they are of
        tl.store(out, tl.zeros([ROWS, PAIRS], tl.float32), mask=mask)
        return
    # Without the promise of alignment the compiler copies byte by byte.
    gate_at = tl.multiple_of(gate_at.to(tl.pointer_type(tl.uint8)), 16)
    up_at = tl.multiple_of(up_at.to(tl.pointer_type(tl.uint8)), 16)
    stored = row if WIDTH % ROWS == 0 else tl.minimum(row, WIDTH - 1)
    first = start.to(tl.int64)
    gate = block_products(
        gate_at, gate_codes, gate_scales,
        gate_sums, first, stored, GATE, GATE_BYTES, GATE_ROW, HIDDEN, PAIRS, PTX,
    )  # fmt: skip
    up = block_products(
        up_at, up_codes, up_scales,
        up_sums, first, stored, UP, UP_BYTES, UP_ROW, HIDDEN, PAIRS, PTX,
    )  # fmt: skip
    weight = tl.load(weights + start + pair, mask=inside, other=0.0)[None, :]
    tl.store(out, gated(gate, up, weight, limit, BF16), mask=mask)


@triton.jit(do_not_specialize=["n_groups"], do_not_specialize_on_alignment=["tiles"])
def _block_rows_down_kernel(
    codes, scales, sums, tiles, pointers, parts, n_groups,
    DOWN: tl.constexpr, DOWN_BYTES: tl.constexpr, DOWN_ROW: tl.constexpr, HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, BF16: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(1) * 3
    group, start, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    at = tl.load(pointers + 2 * n_groups + group)
    pair = tl.arange(0, PAIRS)
    inside = pair < count
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    out = parts + (start + pair).to(tl.int64)[None, :] * HIDDEN + row[:, None]
    mask = inside[None, :] & (row < HIDDEN)[:, None]
    if at == 0:
        tl.store(out, tl.zeros([ROWS, PAIRS], tl.float32), mask=mask)
        return
    matrix = tl.multiple_of(at.to(tl.pointer_type(tl.uint8)), 16)
    stored = row if HIDDEN % ROWS == 0 else tl.minimum(row, HIDDEN - 1)
    y = block_products(
        matrix, codes, scales, sums,
        start.to(tl.int64), stored, DOWN, DOWN_BYTES, DOWN_ROW, WIDTH, PAIRS, PTX,
    )  # fmt: skip
    tl.store(out, rounded(y, BF16), mask=mask)


def launch_blocks(
    x: Tensor,
    tokens: Tensor,
    weights: Tensor,
    starts: Sequence[int],
    pointers: Tensor,
    parts: Tensor,
    shape: BlockShape,
    limit: float,
    *,
    plain: bool = False,
) -> None:
    """Fill `parts` [R, hidden] with each pair's output; plain: without inline PTX."""
    n_groups = pointers.shape[1]
    tiles = device_tiles(starts, PAIRS, x.device)
    activated = torch.empty((len(tokens), shape.width), dtype=parts.dtype, device=x.device)
    rows: dict[str, TiledRows] = {}
    for form in {FORMS[shape.gate], FORMS[shape.up]}:
        rows[form] = tiled_rows(x, form, tokens, spare=PAIRS[-1])
    common = {"HIDDEN": shape.hidden, "WIDTH": shape.width, "BF16": parts.dtype == torch.bfloat16}
    common["PTX"] = speaks_ptx(x.device) and not plain
    for size, found in tiles.items():
        _block_rows_gate_up_kernel[(triton.cdiv(shape.width, ROWS[size]), len(found))](
            *rows[FORMS[shape.gate]], *rows[FORMS[shape.up]],
            weights, found, pointers, activated, n_groups, limit,
            **_matrix("GATE", shape.gate, shape.hidden), **_matrix("UP", shape.up, shape.hidden),
            **common, **_options(size),
        )  # fmt: skip
    between = tiled_rows(activated, FORMS[shape.down], spare=PAIRS[-1])
    for size, found in tiles.items():
        _block_rows_down_kernel[(triton.cdiv(shape.hidden, ROWS[size]), len(found))](
            *between, found, pointers, parts, n_groups,
            **_matrix("DOWN", shape.down, shape.width), **common, **_options(size),
        )  # fmt: skip


def _matrix(piece: str, name: str, k: int) -> dict[str, Any]:
    return {
        piece: name,
        f"{piece}_BYTES": UNITS[name].block_bytes,
        f"{piece}_ROW": row_bytes(name, k),
    }


def _options(size: int) -> dict[str, Any]:
    return {
        "PAIRS": size,
        "ROWS": ROWS[size],
        "num_warps": WARPS[size],
        "num_stages": STAGES[size],
        **({"maxnreg": REGISTERS[size]} if REGISTERS[size] else {}),
    }
