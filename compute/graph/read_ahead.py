"""Asks for the weights of the next products while the memory stands idle.

Small kernels, the attention and the router leave the memory to itself for a third of a step. What
is asked for here lies in the second-level cache when its product begins. Order and amounts follow
that cache's size: what one product has not read yet must not be pushed out for the next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compute.model.matrix import Matrix, StoredMatrix
from kernels.prefetch_l2 import prefetch_l2

from .side_stream import SideStream

_LEAST_BYTES = 1 << 20  # smaller matrices come fast enough


class ReadAhead:
    """`ask` for matrices on a CUDA stream beside the current one, from this place on."""

    def __init__(self, device: torch.device, *, is_on: bool = True) -> None:
        self._is_on = is_on and device.type == "cuda"
        self._side = SideStream(device, is_on=is_on)

    def ask(self, *matrices: Matrix | None) -> None:
        """Ask for whole matrices."""
        wanted = [data for matrix in matrices if (data := _bytes_of(matrix)) is not None]
        if not self._is_on or not wanted:
            return
        with self._side.fork():
            for data in wanted:
                prefetch_l2(data)

    def join(self) -> None:
        """Let a recording end: nothing is waited for but the asking."""
        if self._is_on:
            self._side.join()


def _bytes_of(matrix: Matrix | None) -> Tensor | None:
    if not isinstance(matrix, StoredMatrix):
        return None
    size = matrix.values.numel() * matrix.values.element_size()
    return matrix.values if size >= _LEAST_BYTES else None
