"""The four precisions that the model can run at, and the roundings that each of them does.

| precision | activations | residual streams | activation roundings |
| --- | --- | --- | --- |
| vendor | bf16 | bf16 | all |
| highway | bf16 | f32 | all |
| wide | f32 | f32 | all |
| unrounded | f32 | f32 | none |

Roundings go by the role of a matrix, not by how a file stores it: a matrix that the vendor keeps in
fp8 or fp4 has its input rounded also where it comes from block formats. So the same values give the
same bits, whatever form a model comes in.

Source: model specification, sections 2 and 2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from kernels.reference import round_fp8 as reference
from kernels.reference.round_fp4_index import round_fp4_index
from kernels.reference.round_fp4_latent import round_fp4_latent

Rounding = Callable[[Tensor], Tensor]


class Precision(Enum):
    """How activations and streams are kept; the value is the name on the command line."""

    VENDOR = "vendor"
    HIGHWAY = "highway"
    WIDE = "wide"
    UNROUNDED = "unrounded"


@dataclass(frozen=True, slots=True)
class Numerics:
    """What a precision means for each tensor. A rounding takes any float dtype and returns f32.

    What the roundings return is exact in `activation`: keeping it in f32 saves the way back.
    """

    activation: torch.dtype  # between modules
    stream: torch.dtype  # the residual streams
    round_input: Rounding  # inputs of fp8 and fp4 matrices
    round_window: Rounding  # window rows
    round_index: Rounding  # index queries and keys
    round_latent: Rounding  # compressed rows

    @property
    def rounds(self) -> bool:
        """Whether activation roundings are done: all of them or none."""
        return self.round_input is not Tensor.float

    @classmethod
    def of(cls, precision: Precision) -> Numerics:
        """Return what `precision` means."""
        bf16 = precision in {Precision.VENDOR, Precision.HIGHWAY}
        activation = torch.bfloat16 if bf16 else torch.float32
        stream = torch.bfloat16 if precision is Precision.VENDOR else torch.float32
        if precision is Precision.UNROUNDED:
            return cls(activation, stream, *(Tensor.float,) * 4)
        return cls(activation, stream, round_fp8, round_fp8, round_fp4_index, round_fp4_latent)


def round_fp8(x: Tensor) -> Tensor:
    """Return x [..., k] rounded to fp8 in groups of 32, f32; on a GPU in one launch."""
    if not x.is_cuda:
        return reference.round_fp8(x)
    from kernels.round_fp8 import round_fp8 as launch  # noqa: PLC0415  Triton takes long to import

    return launch(x.reshape(-1, x.shape[-1]).contiguous()).view(x.shape)
