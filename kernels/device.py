"""Which body of an operator runs: Triton on a GPU and under its interpreter, torch elsewhere."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from torch import Tensor


def runs_kernels(x: Tensor) -> bool:
    """Whether launchers run Triton on x: on a GPU, or on the CPU under Triton's interpreter."""
    return x.is_cuda or interpreted()


def can_be_read(source: Tensor, beside: Tensor) -> bool:
    """Whether launches beside a tensor may read `source`: from there, or page-locked memory.

    Of an empty one nothing is read, wherever it lies; torch calls none of them page-locked.
    """
    if source.device == beside.device or not source.numel():
        return True
    return beside.is_cuda and source.is_pinned()


def interpreted() -> bool:
    """Whether Triton's interpreter stands in for a device (TRITON_INTERPRET=1)."""
    return bool(triton.knobs.runtime.interpret)


@lru_cache(maxsize=16)
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability, (0, 0) where kernels are not compiled for a GPU."""
    if device.type != "cuda" or interpreted():
        return 0, 0
    return torch.cuda.get_device_capability(device)


def speaks_ptx(device: torch.device) -> bool:
    """Whether kernels with inline PTX and explicit layouts run on this device.

    They want byte dot products and byte permutes of compute capability 8.0 or newer.
    """
    return capability(device) >= (8, 0)


def has_byte_products(device: torch.device) -> bool:
    """Whether tensor cores multiply bytes into whole numbers on this device.

    From compute capability 8.0 on, but for 10 and 11, whose tensor cores no longer do.
    """
    return capability(device) >= (8, 0) and capability(device)[0] not in {10, 11}


def has_warpgroup_products(device: torch.device) -> bool:
    """Whether kernels with the products of Hopper's warp groups run on this device."""
    return capability(device)[0] == 9


def has_bulk_copies(device: torch.device) -> bool:
    """Whether kernels with bulk copies of 227 KiB into shared memory run on this device.

    Of the GPUs from compute capability 9.0 on, those for desktops have less shared memory.
    """
    return capability(device)[0] in {9, 10}
