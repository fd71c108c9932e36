"""Belady's optimum: the fewest misses that any cache of a size could have, knowing the future.

It evicts what is needed again last. Picks are served one by one, which is easier than a layer's
at once, so no policy can beat the figure. Pure.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from .ranking import Keys
from .replay import Replayed
from .routing_trace import RoutingTrace


def optimum(trace: RoutingTrace, n_resident: int) -> Replayed:
    """Replay a trace over `n_resident` slots with perfect foresight."""
    missed = np.array(_missed(trace.keys, trace.shape.n_keys, n_resident), np.int64)
    counted = Replayed.blank(len(trace))
    step = np.searchsorted(trace.starts, missed, side="right") - 1
    counted.misses[:] = np.bincount(step, minlength=len(trace))
    layer = trace.keys[missed] // trace.shape.n_experts
    bursts = np.unique(step * trace.shape.n_layers + layer) // trace.shape.n_layers
    counted.bursts[:] = np.bincount(bursts, minlength=len(trace))
    counted.arena_picks[:] = np.diff(trace.starts)
    return counted


def next_uses(keys: Keys) -> NDArray[np.int64]:
    """Return for each place in `keys` where the same key comes next; len(keys): never."""
    order = np.argsort(keys, kind="stable")
    following = np.full(len(keys), len(keys), np.int64)
    again = keys[order[1:]] == keys[order[:-1]]
    following[order[:-1][again]] = order[1:][again]
    return following


def _missed(keys: Keys, n_keys: int, n_resident: int) -> list[int]:
    """Return the places in `keys` whose key is absent when its turn comes."""
    resident = bytearray(n_keys)
    next_use = [0] * n_keys
    farthest: list[tuple[int, int]] = []  # (-next use, key); entries of the past are stale
    missed: list[int] = []
    n_free = n_resident
    for place, (key, following) in enumerate(
        zip(keys.tolist(), next_uses(keys).tolist(), strict=True)
    ):
        next_use[key] = following
        if not resident[key]:
            missed.append(place)
            if n_free:
                n_free -= 1
            else:
                _evict_farthest(farthest, resident, next_use)
            resident[key] = 1
        heapq.heappush(farthest, (-following, key))
    return missed


def _evict_farthest(
    farthest: list[tuple[int, int]], resident: bytearray, next_use: list[int]
) -> None:
    while True:
        use, key = heapq.heappop(farthest)
        if resident[key] and next_use[key] == -use:
            resident[key] = 0
            return
