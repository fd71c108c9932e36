"""Kernels that begin before the one ahead of them has ended.

On NVIDIA GPUs from compute capability 9.0 on, a kernel launched so is set up while the kernel
before it in its CUDA stream still runs, and waits where it joins it. Each such kernel joins before
it reads or writes anything, so that whoever waits for it has waited for all before it as well.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from .device import interpreted


@triton.jit
def join_previous(EARLY: tl.constexpr):
    """Wait until the kernel before has ended, then let the kernel after begin."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def early(device: torch.device) -> dict[str, bool]:
    """Return the options of a launch whose kernel joins the one before it."""
    return {"EARLY": True, "launch_pdl": True} if _can_begin_early(device) else {"EARLY": False}


@lru_cache(maxsize=16)
def _can_begin_early(device: torch.device) -> bool:
    if device.type != "cuda" or interpreted():
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
