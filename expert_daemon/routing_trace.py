"""What the router picked, step by step, as flat arrays: the form that traces are replayed from.

Pure. A key is layer * n_experts + expert, here as in the policies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.files.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class TraceShape:
    """The model that a trace belongs to."""

    n_layers: int
    n_experts: int  # a layer
    top_k: int
    expert_bytes: int  # read for one expert; the largest layer's where they differ
    slot_bytes: int  # one expert's place in the arena
    fingerprint: bytes = bytes(16)  # of the checkpoint; zero: made up

    @property
    def n_keys(self) -> int:
        """Experts of all layers."""
        return self.n_layers * self.n_experts

    @property
    def picks_per_token(self) -> int:
        """Picks of one token in all layers."""
        return self.n_layers * self.top_k


def shape_of(checkpoint: Checkpoint) -> TraceShape:
    """Return the shape of traces of this checkpoint."""
    config, image = checkpoint.config, checkpoint.slice_map.image
    return TraceShape(
        n_layers=config.n_layers,
        n_experts=config.n_experts,
        top_k=config.top_k,
        expert_bytes=image.expert_bytes,
        slot_bytes=image.slot_bytes,
        fingerprint=checkpoint.fingerprint,
    )


@dataclass(frozen=True, slots=True)
class RoutingTrace:
    """Steps in the order they ran.

    Invariants: a step's keys ascend and are distinct; a token step has top_k keys in every layer.
    """

    shape: TraceShape
    keys: NDArray[np.int64]  # all steps' picks, one behind the other
    starts: NDArray[np.int64]  # [n_steps + 1], where each step begins in `keys`
    is_token: NDArray[np.bool_]  # [n_steps]; the others are chunks: the union of many tokens' picks

    def __len__(self) -> int:
        return len(self.is_token)

    @property
    def n_tokens(self) -> int:
        """Steps that are one token each."""
        return int(np.count_nonzero(self.is_token))

    def step(self, number: int) -> NDArray[np.int64]:
        """The keys of one step, ascending."""
        return self.keys[self.starts[number] : self.starts[number + 1]]

    def steps(self) -> Iterator[NDArray[np.int64]]:
        """The keys of each step."""
        bounds = self.starts.tolist()
        for first, end in pairwise(bounds):
            yield self.keys[first:end]

    def first_steps(self, n_steps: int) -> RoutingTrace:
        """The same trace, ended early."""
        starts = self.starts[: n_steps + 1]
        return RoutingTrace(self.shape, self.keys[: starts[-1]], starts, self.is_token[:n_steps])


def from_tokens(shape: TraceShape, experts: NDArray[Any]) -> RoutingTrace:
    """Make a trace of single tokens from their picks.

    experts  whole numbers [n_tokens, n_layers, top_k], distinct in the last axis
    """
    first_of_layer = np.arange(shape.n_layers, dtype=np.int64)[:, None] * shape.n_experts
    keys = (np.sort(experts, axis=-1).astype(np.int64) + first_of_layer).reshape(-1)
    n_tokens = len(experts)
    starts = np.arange(n_tokens + 1, dtype=np.int64) * shape.picks_per_token
    return RoutingTrace(shape, keys, starts, np.ones(n_tokens, np.bool_))


def shared_with_previous(trace: RoutingTrace) -> float:
    """The share of a token's picks that the token before it had picked too; 0 without a pair."""
    shape = trace.shape
    n_shared = n_picks = 0
    previous: NDArray[np.int64] | None = None
    for keys, is_token in zip(trace.steps(), trace.is_token.tolist(), strict=True):
        if previous is not None and is_token:
            n_shared += len(np.intersect1d(keys, previous, assume_unique=True))
            n_picks += shape.picks_per_token
        previous = keys if is_token else None
    return n_shared / n_picks if n_picks else 0.0
