"""Two kernels with an error each, which show that a checker of kernels sees such an error here."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl


@triton.jit
def read_beyond_kernel(x, out):
    """Read the value behind the last one."""
    tl.store(out, tl.load(x + 3))


@triton.jit
def race_kernel(x, out):
    """Let all warps write one place of shared memory, which the sum after it takes up, at once."""
    at = tl.arange(0, 256)
    v = tl.inline_asm_elementwise(
        "{ st.shared.u32 [global_smem], $1; mov.u32 $0, $1; }", "=r,r", [tl.load(x + at)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(out, tl.sum(v, 0))


def _read_beyond() -> None:
    read_beyond_kernel[(1,)](torch.arange(3).to("cuda"), torch.arange(1).to("cuda"))


def _race() -> None:
    values = torch.arange(256, dtype=torch.int32)
    race_kernel[(1,)](values.to("cuda"), values[:1].to("cuda"))


# What the tools of compute-sanitizer look for.
PLANTED: dict[str, tuple[str, Callable[[], None]]] = {
    "memcheck": ("planted_errors.read_beyond_kernel", _read_beyond),
    "racecheck": ("planted_errors.race_kernel", _race),
}
