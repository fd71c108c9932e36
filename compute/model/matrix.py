"""Dense matrices and products with them.

On the CPU a matrix is f32, dequantised when it was loaded. On a GPU it stays as the file stores it:
a few rows are multiplied by the kernels that read it so, many by torch after a dequantisation that
lives as long as the product. Matrices that read the same input are one where they are stored alike,
else each gives its columns of the product. Values are exact either way; only the order of summation
differs. But what is multiplied with blocks as they are stored is rounded to eight bits first: a few
rows always, many rows of bf16 where the GPU multiplies bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.formats import FORMATS, fp8
from kernels.reference import linear as reference

MAX_ROWS = 8  # that the kernels for a few rows take
FP8 = "F8_E4M3"
BF16 = "BF16"
# Block formats that a few rows, themselves rounded to q8_1, are multiplied with as they are stored.
ROW_BLOCKS = frozenset({"Q8_0", "Q6_K", "Q4_K", "Q3_K", "Q2_K"})


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix [n, k] as a file stores it, on a GPU.

    values  u8 [n, bytes of a row] or bf16 [n, k]
    scales  u8 [n / 32, k / 32] of fp8 tiles, else None
    format  "F8_E4M3", "BF16" or a block format's name
    groups  rows g * n / groups .. take the g-th k channels of what is multiplied
    """

    values: Tensor
    scales: Tensor | None
    format: str
    k: int
    groups: int = 1

    @property
    def n(self) -> int:
        """Rows of the matrix."""
        return self.values.shape[0]

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return [n, k] in a dtype that holds its values exactly."""
        if self.format == FP8:
            assert self.scales is not None
            if dtype == torch.bfloat16 and self.values.is_cuda:
                from kernels.fp8_to_bf16 import fp8_to_bf16  # noqa: PLC0415  imports Triton

                return fp8_to_bf16(self.values, self.scales)
            return fp8.dequantise_tiles(self.values, self.scales).to(dtype)
        if self.format == BF16:
            return self.values.to(dtype)
        return FORMATS[self.format].dequantise(self.values).view(self.n, self.k).to(dtype)

    def row_product(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return x . matrix^T [M, n] f32 of at most MAX_ROWS rows x [M, groups * k] f32.

        In `out` where given.

        A matrix of blocks takes rows rounded to q8_1, as the kernel for it does.
        """
        if self.format in {FP8, BF16}:
            from kernels.gemv import gemv  # noqa: PLC0415  Triton takes long to import

            return gemv(x, self.values, self.scales, groups=self.groups, out=out)
        if self.format in ROW_BLOCKS:
            from kernels.gemv_blocks import gemv_blocks  # noqa: PLC0415  as above

            return gemv_blocks(x, self.values, self.format, groups=self.groups, out=out)
        weight = self.dequantised(torch.float32).view(self.groups, -1, self.k)
        rows = x.view(x.shape[0], self.groups, self.k).transpose(0, 1)
        found = torch.bmm(rows, weight.transpose(1, 2)).transpose(0, 1).flatten(1)
        return found if out is None else out.copy_(found)


@dataclass(frozen=True, slots=True)
class StackedMatrix:
    """Matrices [n_i, k] one below the other that are not stored alike; each is multiplied itself.

    parts  f32 [n_i, k], or as stored, of one group
    """

    parts: tuple[Tensor | StoredMatrix, ...]

    @property
    def n(self) -> int:
        """Rows of the matrix."""
        return sum(map(_n_rows, self.parts))

    def row_product(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return x . matrix^T [M, n] f32 of at most MAX_ROWS rows x [M, k] f32, in `out` if given.

        One row's columns are written where they belong, without a copy.
        """
        if out is None:
            out = torch.empty((x.shape[0], self.n), device=x.device)
        first = 0
        for part in self.parts:
            last = first + _n_rows(part)
            columns = out[:, first:last]
            if isinstance(part, Tensor):
                columns.copy_(torch.nn.functional.linear(x, part))
            elif columns.is_contiguous():
                part.row_product(x, out=columns)
            else:
                columns.copy_(part.row_product(x))
            first = last
        return out


def _n_rows(matrix: Tensor | StoredMatrix) -> int:
    return len(matrix) if isinstance(matrix, Tensor) else matrix.n


# Tensor: f32, [n, k] or [groups, n / groups, k]
Matrix = Tensor | StoredMatrix | StackedMatrix


def linear(x: Tensor, weight: Matrix, dtype: torch.dtype) -> Tensor:
    """Multiply rows with a matrix: x . weight^T, summed in f32, one cast at the end.

    x        [T, k] bf16 or f32
    returns  [T, n] `dtype`

    Source: model specification, section 2.2, Scaled GEMM.
    """
    if isinstance(weight, Tensor):
        return reference.linear(x, weight, dtype)
    if isinstance(weight, StackedMatrix):
        return torch.cat([linear(x, part, dtype) for part in weight.parts], dim=1)
    if x.shape[0] <= MAX_ROWS:
        return weight.row_product(x.float().contiguous()).to(dtype)
    return _product(x.unsqueeze(0), weight, dtype)[0]


def grouped_linear(x: Tensor, weight: Matrix, dtype: torch.dtype) -> Tensor:
    """Multiply each group of channels with its own matrix.

    x        [T, groups, k] bf16 or f32
    returns  [T, groups, n / groups] `dtype`, contiguous where the matrix is a StoredMatrix

    Source: model specification, section 3.3, step 6.
    """
    if isinstance(weight, Tensor):
        return reference.grouped_linear(x, weight, dtype)
    assert isinstance(weight, StoredMatrix), "groups are of one matrix"
    n_rows = x.shape[0]
    if n_rows <= MAX_ROWS:
        flat = x.reshape(n_rows, -1).float().contiguous()
        return weight.row_product(flat).to(dtype).view(n_rows, weight.groups, -1)
    shape = (n_rows, weight.groups, weight.n // weight.groups)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    _product(x.transpose(0, 1), weight, dtype, out.transpose(0, 1))
    return out


def _product(
    x: Tensor, weight: StoredMatrix, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Return [groups, T, n / groups] `dtype` of x [groups, T, k], in `out` where given."""
    if _goes_by_blocks(x, weight, dtype):
        return _blocks_product(x, weight, dtype, out)
    is_exact = x.is_cuda and is_exact_in_bf16(x, weight, dtype)
    kind = torch.bfloat16 if is_exact else torch.float32
    matrix = weight.dequantised(kind).view(weight.groups, -1, weight.k).transpose(1, 2)
    rows = x.to(kind)
    if kind == dtype:
        return torch.bmm(rows, matrix, out=out)
    if is_exact:
        found = torch.bmm(rows, matrix, out_dtype=torch.float32)
    else:
        found = torch.bmm(rows, matrix).to(dtype)
    return found if out is None else out.copy_(found)


def _goes_by_blocks(x: Tensor, weight: StoredMatrix, dtype: torch.dtype) -> bool:
    """Whether many rows are rounded to eight bits, as few are: at bf16, wider ones stay exact."""
    if not (x.is_cuda and weight.format in ROW_BLOCKS and torch.bfloat16 in {dtype, x.dtype}):
        return False
    from kernels.device import has_byte_products  # noqa: PLC0415  imports Triton

    return has_byte_products(x.device)


def _blocks_product(
    x: Tensor, weight: StoredMatrix, dtype: torch.dtype, out: Tensor | None
) -> Tensor:
    """Return what `_product` does, of a matrix of blocks as it is stored."""
    from kernels.gemm_blocks import gemm_blocks  # noqa: PLC0415  imports Triton

    lines = weight.n // weight.groups
    if out is None:
        out = torch.empty((weight.groups, x.shape[1], lines), dtype=dtype, device=x.device)
    for group, rows in enumerate(x):
        matrix = weight.values[group * lines : (group + 1) * lines]
        out[group] = gemm_blocks(rows.contiguous(), matrix, weight.format)
    return out


def is_exact_in_bf16(x: Tensor, weight: StoredMatrix, dtype: torch.dtype) -> bool:
    """Whether the product's factors are bf16 values: then tensor cores lose nothing.

    Where activations are bf16, rows given in f32 are rounded ones, exact in bf16 as well.
    """
    return weight.format in {FP8, BF16} and (torch.bfloat16 in {dtype, x.dtype})
