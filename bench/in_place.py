"""Routed experts read in place from page-locked host memory, against a kernel that only reads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bench.timing import seconds
from kernels.formats.fp4_expert import Fp4Shape
from kernels.routed_m1 import routed_m1

HIDDEN, WIDTH, TOP_K, LIMIT = 5120, 2304, 6, 10.0
MATRIX, SCALES = WIDTH * HIDDEN // 2, WIDTH * HIDDEN // 32
BYTES = 3 * (MATRIX + SCALES)
_BLOCK, _PROGRAMS = 4096, 132 * 4


# The compiler reads annotations: it takes none but its own.
@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _read_kernel(  # type: ignore[no-untyped-def]
    address,  # noqa: ANN001
    out,  # noqa: ANN001
    n_words,  # noqa: ANN001
    BLOCK: tl.constexpr,
) -> None:
    words = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(tl.program_id(0) * BLOCK, n_words, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(words + at, mask=at < n_words, other=0)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def in_place(n_layers: int, repeats: int) -> dict[str, float]:
    """Return GB/s of both over `n_layers` times six experts, and the share of the first."""
    n_experts = n_layers * TOP_K
    slots = torch.empty(n_experts * BYTES, dtype=torch.uint8, pin_memory=True)
    whole = slots.view(n_experts, 3, MATRIX + SCALES)
    whole[:, :, :MATRIX] = torch.randint(0, 256, (MATRIX,), dtype=torch.uint8)
    whole[:, :, MATRIX:] = 120
    shape = Fp4Shape(HIDDEN, WIDTH, MATRIX, MATRIX, MATRIX)
    starts = slots.data_ptr() + torch.arange(n_experts) * BYTES
    table = torch.stack([starts + i * (MATRIX + SCALES) for i in range(3)]).view(3, n_layers, TOP_K)
    pointers = [table[:, layer].contiguous().cuda() for layer in range(n_layers)]
    x = torch.randn(1, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weights = torch.rand(TOP_K, device="cuda")
    taken = seconds(lambda: [routed_m1(x, at, weights, shape, LIMIT) for at in pointers], repeats)
    sums = torch.zeros(_PROGRAMS, dtype=torch.int32, device="cuda")
    n_words = slots.numel() // 4

    def read() -> None:
        _read_kernel[(_PROGRAMS,)](int(slots.data_ptr()), sums, n_words, BLOCK=_BLOCK, num_warps=8)

    ceiling = seconds(read, repeats)
    return {
        "in_place_gb_s": slots.numel() / taken / 1e9,
        "in_place_read_gb_s": slots.numel() / ceiling / 1e9,
        "in_place_fraction": ceiling / taken,
    }
