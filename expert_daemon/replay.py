"""A routing trace replayed over the arena alone, or over a device cache and the arena.

What runs here is the daemon's own policy, asked as the slot cache asks it: a layer with an absent
expert opens a window with all its picks that are not on the device, which counts them, takes
victims outside of them and admits what was read; a step's other picks are counted at its end. Reads
end at once, and readers lease nothing. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .device_tier import DeviceTier
from .policy import Policy
from .ranking import Keys
from .routing_trace import RoutingTrace


@dataclass(frozen=True, slots=True)
class Replayed:
    """What each step cost."""

    misses: NDArray[np.int64]  # [n_steps], experts read from disk
    bursts: NDArray[np.int64]  # [n_steps], layers that had to wait for reads
    arena_picks: NDArray[np.int64]  # [n_steps], picks that were not on the device

    @classmethod
    def blank(cls, n_steps: int) -> Replayed:
        """Nothing counted yet."""
        return cls(*(np.zeros(n_steps, np.int64) for _ in range(3)))


class ArenaTier:
    """The keys that `n_resident` slots hold."""

    def __init__(self, n_keys: int, n_resident: int, policy: Policy, max_experts: int = 0) -> None:
        """`max_experts`: the most of one window, at most `n_resident`; 0: as many as fit."""
        self.resident = np.zeros(n_keys, np.bool_)
        self.policy = policy
        self.max_experts = min(max_experts or n_resident, n_resident)
        self._n_free = n_resident

    def window(self, keys: Keys) -> int:
        """Bring one layer's keys in, at most `max_experts`; return how many were read."""
        policy, resident = self.policy, self.resident
        policy.use(keys)
        absent: list[int] = keys[~resident[keys]].tolist()
        n_over = len(absent) - self._n_free
        if n_over > 0:
            victims = policy.victims(n_over, frozenset(keys.tolist()))
            for key in victims:
                policy.evict(key)
            resident[victims] = False
            self._n_free += len(victims)
        for key in absent:
            policy.admit(key)
        resident[absent] = True
        self._n_free -= len(absent)
        return len(absent)


def replay(trace: RoutingTrace, arena: ArenaTier, device: DeviceTier | None = None) -> Replayed:
    """Run all steps through the caches, which may hold something already, and count."""
    n_experts = trace.shape.n_experts
    counted = Replayed.blank(len(trace))
    for number, keys in enumerate(trace.steps()):
        wanted = keys if device is None else keys[~device.resident[keys]]
        counted.arena_picks[number] = len(wanted)
        in_windows: list[Keys] = []
        for layer_keys in _windows(arena, wanted, n_experts):
            counted.misses[number] += arena.window(layer_keys)
            counted.bursts[number] += 1
            in_windows.append(layer_keys)
        arena.policy.use(_without(keys, in_windows))
        if device is not None:
            device.end_step(keys, wanted[arena.resident[wanted]])
    return counted


def _windows(arena: ArenaTier, keys: Keys, n_experts: int) -> Iterator[Keys]:
    """Yield the groups of keys, of one layer each, in which one is absent when their turn comes."""
    place = 0
    while place < len(keys):
        absent = np.flatnonzero(~arena.resident[keys[place:]])
        if not len(absent):
            return
        first = place + int(absent[0])
        layer = int(keys[first]) // n_experts
        begin, end = np.searchsorted(keys, (layer * n_experts, (layer + 1) * n_experts)).tolist()
        for group in range(max(begin, place), end, arena.max_experts):
            layer_keys = keys[group : min(group + arena.max_experts, end)]
            if not arena.resident[layer_keys].all():
                yield layer_keys
        place = end


def _without(keys: Keys, parts: list[Keys]) -> Keys:
    """The ascending keys that are in none of the ascending, disjoint parts."""
    if not parts:
        return keys
    left = np.ones(len(keys), np.bool_)
    left[np.searchsorted(keys, np.concatenate(parts))] = False
    return keys[left]
