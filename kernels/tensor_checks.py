"""What launchers ask of a tensor whose strides a kernel does not know.

Invariants: a check costs attributes of tensors alone, since it stands before each launch; an error
names the launcher and the argument, what was found and what was wanted.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_contiguous(launcher: str, **tensors: Tensor | None) -> None:
    """Raise ValueError for the first of the tensors, by their names, that is not contiguous."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(
                f"{launcher}: {name} {tuple(tensor.shape)} has strides {tensor.stride()}, "
                "wanted contiguous"
            )


def check_rows(launcher: str, **tensors: Tensor) -> None:
    """Raise ValueError for the first of the tensors [T, k], by their names, with gaps in a row."""
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(
                f"{launcher}: {name} {tuple(tensor.shape)} has strides {tensor.stride()}, "
                "wanted contiguous rows"
            )


def check_tensor(
    launcher: str, name: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype
) -> None:
    """Raise ValueError unless a tensor is of a shape and one of the dtypes, and contiguous."""
    if tensor.shape != shape or tensor.dtype not in dtypes:
        kinds = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(
            f"{launcher}: {name} {tuple(tensor.shape)} {tensor.dtype}, wanted {shape} {kinds}"
        )
    if not tensor.is_contiguous():
        check_contiguous(launcher, **{name: tensor})
