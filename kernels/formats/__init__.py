"""The block formats that weights and activations are stored in.

`FORMATS` maps the name of each GGUF block format to its module, which has NAME, BLOCK_VALUES,
BLOCK_BYTES and `dequantise`; `QUANTISERS` maps those that can also be written to their `quantise`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from . import bf16, f16, f32, iq2_xxs, mxfp4, q2_k, q3_k, q4_k, q5_k, q6_k, q8_0


class BlockFormat(Protocol):
    """What every module of a block format offers."""

    NAME: str
    BLOCK_VALUES: int
    BLOCK_BYTES: int

    def dequantise(self, blocks: Tensor) -> Tensor:
        """Values [..., n * BLOCK_VALUES] f32 of blocks [..., n * BLOCK_BYTES] u8."""
        ...


FORMATS: dict[str, BlockFormat] = {
    "F32": f32,
    "F16": f16,
    "BF16": bf16,
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "Q8_0": q8_0,
    "MXFP4": mxfp4,
    "IQ2_XXS": iq2_xxs,
}

QUANTISERS: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": f32.quantise,
    "F16": f16.quantise,
    "BF16": bf16.quantise,
    "Q2_K": q2_k.quantise,
    "Q3_K": q3_k.quantise,
    "Q4_K": q4_k.quantise,
    "Q6_K": q6_k.quantise,
    "Q8_0": q8_0.quantise,
    "MXFP4": mxfp4.quantise,
}
