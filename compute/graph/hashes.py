"""Hashes of a step's streams: what two runs are compared by, line by line."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from .step_buffers import StepBuffers


def hash_of(*tensors: Tensor) -> str:
    """Return 16 hexadecimal digits of the tensors' bytes."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


class Tracer:
    """Prints a line a segment: position, layers, hashes of the streams and of the logits."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def segment(self, position: int, first: int, end: int, buffers: StepBuffers) -> None:
        """Print a segment's line; that of its last layer is the same in every mode."""
        inputs = buffers.before_engram_of(end)
        middle = hash_of(buffers.middle[end - 1])
        self._write(
            f"position {position} layers {first}..{end - 1} streams {hash_of(inputs)} "
            f"hidden {middle}"
        )
