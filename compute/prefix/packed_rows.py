"""Rows of a sequence's state in the fewest bytes that give every bit back.

The model's roundings put rows on small grids; a row is kept as codes and scales of its grid:

| form | rows | bytes of a row of k values |
| --- | --- | --- |
| fp8 | window rows | k E4M3 + k / 32 E8M0 |
| index | index keys | k / 2 E2M1 pairs + k / 32 E8M0 |
| latent | compressed rows | k / 2 E2M1 pairs + k / 16 E4M3 |
| raw | anything | k of the dtype itself |

Invariants: `unpack` of `pack` has the same bits; rows that are not on their grid are kept raw.
Source: model specification, section 4.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from kernels.formats import fp4, fp8

LATENT_GROUP = 16
_ONE = 127  # E8M0 code of 1
_LEAST_SCALE = 2.0**-9  # of E4M3


class Form(Enum):
    """How rows are kept."""

    RAW = "raw"
    FP8 = "fp8"
    INDEX = "index"
    LATENT = "latent"


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows [n, k], in host memory."""

    form: Form
    parts: tuple[Tensor, ...]  # raw: the rows; else codes u8 and scales u8

    @property
    def n_bytes(self) -> int:
        """Bytes of the rows."""
        return sum(part.numel() * part.element_size() for part in self.parts)


def pack(rows: Tensor, form: Form) -> PackedRows:
    """Pack rows [n, k] bf16 or f32; raw where the form would lose a bit."""
    if form is not Form.RAW and len(rows):
        parts = _encoded(rows.float(), form)
        if parts is not None and _same_bits(_decoded(parts, form), rows.float()):
            return PackedRows(form, tuple(part.cpu() for part in parts))
    return PackedRows(Form.RAW, (rows.to("cpu", copy=True),))


def unpack(packed: PackedRows, device: torch.device) -> Tensor:
    """Return the rows [n, k] on the device: f32, or the rows' own dtype where kept raw."""
    parts = tuple(part.to(device) for part in packed.parts)
    return parts[0] if packed.form is Form.RAW else _decoded(parts, packed.form)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def _encoded(rows: Tensor, form: Form) -> tuple[Tensor, Tensor] | None:
    """Return codes and scales; None where the form has none for such rows."""
    if rows.shape[1] % fp8.TILE or not bool(torch.isfinite(rows).all()):
        return None
    if form is Form.FP8:
        return fp8.quantise_rows(rows)
    return fp4.quantise(rows) if form is Form.INDEX else _encoded_latent(rows)


def _decoded(parts: tuple[Tensor, ...], form: Form) -> Tensor:
    codes, scales = parts
    if form is Form.FP8:
        return fp8.dequantise_rows(codes, scales)
    if form is Form.INDEX:
        return fp4.dequantise(codes, scales)
    ones = codes.new_full((len(codes), codes.shape[1] * fp4.PER_BYTE // fp4.GROUP), _ONE)
    values = torch.unflatten(fp4.dequantise(codes, ones), 1, (-1, LATENT_GROUP))
    return (values * fp8.decode(scales).unsqueeze(-1)).flatten(1)


def _encoded_latent(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Find each group's scale again: the largest value is one of E2M1's times it.

    A scale that fits every value is as good as the first one, since products of it are exact.
    """
    groups = torch.unflatten(rows, 1, (-1, LATENT_GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    scales = torch.full_like(largest, _LEAST_SCALE)
    found = largest == 0
    for magnitude in reversed(fp4.MAGNITUDES[1:]):
        tried = largest / magnitude
        on_grid = (fp8.round_to_grid(tried) == tried) & (tried >= _LEAST_SCALE)
        tried = torch.where(on_grid, tried, 1.0)
        fits = (fp4.round_to_grid(groups / tried) * tried == groups).all(-1, keepdim=True)
        scales = torch.where(on_grid & fits & ~found, tried, scales)
        found |= on_grid & fits
    codes = fp4.encode(groups / scales).view(len(rows), -1, fp4.PER_BYTE)
    return codes[..., 0] | (codes[..., 1] << 4), fp8.encode(scales.squeeze(-1))
