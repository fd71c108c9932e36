"""Hashes of a step's streams: what two runs are compared by, line by line."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .step_buffers import StepBuffers


def hash_of(*tensors: Tensor) -> str:
    """Return 16 hexadecimal digits of the tensors' bytes."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


class Trace(Protocol):
    """What is shown the streams at the end of each segment."""

    def segment(self, position: int, first: int, end: int, buffers: StepBuffers) -> None:
        """Look at a segment's end."""
        ...


class Tracer:
    """Prints a line a segment: position, layers, hashes of the streams and of the hidden ones.

    The streams are those that the segment's last layer hands on, before any Engram of the next;
    hidden are those between the last layer's attention and its experts.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def segment(self, position: int, first: int, end: int, buffers: StepBuffers) -> None:
        """Print a segment's line; but for its first layer it is the same in every mode."""
        streams, hidden = segment_hashes(end, buffers)
        self._write(
            f"position {position} layers {first}..{end - 1} streams {streams} hidden {hidden}"
        )


def segment_hashes(end: int, buffers: StepBuffers) -> tuple[str, str]:
    """Return the hashes of streams and hidden after layer `end` - 1."""
    return hash_of(buffers.before_engram_of(end)), hash_of(buffers.middle[end - 1])
