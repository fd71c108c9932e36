"""Kernels that begin before the one ahead of them has ended.

On NVIDIA GPUs from compute capability 9.0 on, a kernel launched so is set up while the kernel
before it in its CUDA stream still runs, and waits where it joins it. Each such kernel joins before
it reads or writes anything, so that whoever waits for it has waited for all before it as well. One
may read before that what was written by kernels which the kernel ahead of it has joined.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .device import capability


@triton.jit
def join_previous(EARLY: tl.constexpr):
    """Wait until the kernel before has ended, then let the kernel after begin."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def early(device: torch.device) -> dict[str, bool]:
    """Return the options of a launch whose kernel joins the one before it."""
    if capability(device) < (9, 0):
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}
