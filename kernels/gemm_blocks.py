"""Many rows times one dense matrix of GGUF blocks, as the file has them, on tensor cores.

Invariants: rows are rounded to tiled blocks first; a row's bits depend on nothing else in the call.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .block_tiles import block_products
from .block_words import UNITS
from .device import runs_kernels, speaks_ptx
from .formats import FORMATS
from .reference import gemm_blocks as reference
from .reference.gemm_blocks import FORMS
from .tensor_checks import check_contiguous, check_tensor
from .tiled_rows import tiled_rows

_ROWS = 64
_PAIRS = (16, 32, 64)


@triton.jit
def _gemm_blocks_kernel(
    weight, codes, scales, sums, out, m, n,
    FORMAT: tl.constexpr, BYTES: tl.constexpr, ROW_BYTES: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1).to(tl.int64) * PAIRS
    y = block_products(
        weight, codes, scales, sums, first, tl.minimum(row, n - 1),
        FORMAT, BYTES, ROW_BYTES, K, PAIRS, PTX,
    )  # fmt: skip
    source = first + tl.arange(0, PAIRS)
    at = out + source[None, :] * n + row[:, None]
    tl.store(at, y, mask=(source < m)[None, :] & (row < n)[:, None])


def gemm_blocks(
    x: Tensor, weight: Tensor, name: str, *, plain: bool = False, out: Tensor | None = None
) -> Tensor:
    """Multiply rows, rounded to tiled blocks, with a matrix as it is stored: x . weight^T.

    x        [M, k] bf16 or f32, contiguous
    weight   [n, bytes of k values] u8: rows of blocks of the format `name`; on a GPU it begins at a
             multiple of 16 bytes
    plain    takes the body without inline PTX on a GPU too, for comparison
    returns  [M, n] f32, in `out` where given

    A GPU must have byte products (`device.has_byte_products`). Raises ValueError on a shape, dtype
    or format that differs. Within 2e-6 (relative to the row's norm) of `reference.gemm_blocks`.
    Source: ggml block layouts.
    """
    n, k = _check(x, weight, name)
    if out is None:
        out = torch.empty((x.shape[0], n), dtype=torch.float32, device=x.device)
    check_tensor("gemm_blocks", "out", out, (x.shape[0], n), torch.float32)
    if not runs_kernels(x):
        return out.copy_(reference.gemm_blocks(x, weight, name))
    m = x.shape[0]
    if m:
        pairs = next((size for size in _PAIRS if size >= m), _PAIRS[-1])
        _gemm_blocks_kernel[(triton.cdiv(n, _ROWS), triton.cdiv(m, pairs))](
            weight, *tiled_rows(x, FORMS[name], spare=pairs), out, m, n,
            FORMAT=name, BYTES=UNITS[name].block_bytes, ROW_BYTES=weight.shape[1], K=k,
            ROWS=_ROWS, PAIRS=pairs, PTX=speaks_ptx(x.device) and not plain,
        )  # fmt: skip
    return out


def _check(x: Tensor, weight: Tensor, name: str) -> tuple[int, int]:
    if name not in FORMS:
        raise ValueError(f"gemm_blocks: format {name}, wanted one of {', '.join(FORMS)}")
    if weight.dtype != torch.uint8 or weight.dim() != 2:
        raise ValueError(f"gemm_blocks: weight is {weight.dtype} {tuple(weight.shape)}, wanted u8")
    block = FORMATS[name]
    n, row_bytes = weight.shape
    k = row_bytes // block.BLOCK_BYTES * block.BLOCK_VALUES
    if row_bytes % block.BLOCK_BYTES:
        raise ValueError(f"gemm_blocks: rows of {row_bytes} bytes are no whole blocks of {name}")
    if x.dim() != 2 or x.shape[1] != k:
        raise ValueError(f"gemm_blocks: x is {tuple(x.shape)}, wanted [M, {k}]")
    check_contiguous("gemm_blocks", x=x, weight=weight)
    return n, k
