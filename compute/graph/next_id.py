"""The id after a token: launched behind the head, told once the token has ended.

Invariants: whatever is launched reads the logits alone, so it may be launched again with the head;
it is there at the token's end without a wait of its own.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from compute.sampler import Sampling, draw_numbers
from protocol.errors import ShardError

from .launches import Launches
from .step_buffers import StepBuffers


class NextId:
    """`likeliest` and `drawn` are the last token's, until the next one is launched."""

    def __init__(self, buffers: StepBuffers, launches: Launches) -> None:
        pinned = buffers.logits.is_cuda
        self._buffers = buffers
        self._launches = launches
        self._likeliest = torch.zeros(2, dtype=torch.int64, pin_memory=pinned)
        self._numbers = buffers.staged_numbers.numpy().view(np.uint64)
        self._position = -1  # of the token
        self._sampling: Sampling | None = None

    def expect(self, position: int, sampling: Sampling | None) -> None:
        """The token at `position` is next; sampling: how the id after it is drawn, None: not."""
        self._position, self._sampling = position, sampling

    def launch(self) -> None:
        """Launch behind the head what finds the id."""
        self._likeliest.copy_(self._buffers.likeliest, non_blocking=True)
        if self._sampling is not None:
            numbers = draw_numbers(self._sampling, self._position + 1)
            self._numbers[:] = numbers
            self._launches.draw(filtered=numbers.is_filtered)

    def likeliest(self) -> int:
        """Return the id of the largest logit. Raises ShardError on a NaN."""
        return self._found(self._likeliest)

    def drawn(self) -> int:
        """Return the id that was drawn. Raises ShardError on a NaN."""
        return self._found(self._buffers.drawn)

    def _found(self, found: Tensor) -> int:
        token, is_nan = found.tolist()
        if is_nan:
            raise ShardError(
                f"position {self._position + 1}: the logit of id {token} is NaN; check the weights"
            )
        return int(token)
