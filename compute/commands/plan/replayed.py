"""The hits of a replayed trace's steps, and which steps are cold and which warm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .rates import Hits

if TYPE_CHECKING:
    from expert_daemon.burst_sizes import Bursts
    from expert_daemon.routing_trace import RoutingTrace


def hits_of(trace: RoutingTrace, bursts: Bursts, steps: NDArray[np.int64]) -> Hits:
    """Return the mean shares of some token steps."""
    shape = trace.shape
    sizes = bursts.of(steps)
    n_picks = len(steps) * shape.picks_per_token
    return Hits(
        device=1 - float(bursts.arena_picks[steps].sum()) / n_picks,
        miss=float(sizes.sum()) / n_picks,
        burst=len(sizes) / (len(steps) * shape.n_layers),
    )


def warm_steps(trace: RoutingTrace) -> NDArray[np.int64]:
    """Return the token steps behind the first quarter, which fills the caches."""
    tokens = np.flatnonzero(trace.is_token)
    return tokens[len(tokens) // 4 :]


def cold_steps(trace: RoutingTrace, n_tokens: int) -> NDArray[np.int64]:
    """Return the first token steps."""
    return np.flatnonzero(trace.is_token)[:n_tokens]
