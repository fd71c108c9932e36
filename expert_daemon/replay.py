"""A routing trace replayed over the arena alone, or over a device cache and the arena.

What runs here is the daemon's own policy, asked as the slot cache asks it: a layer with an absent
expert opens a window with all its picks that are not on the device, which counts them, takes
victims outside of them and admits what was read; a step's other picks are counted at its end. A
chunk's experts stream through as guests, in at most a quarter of the slots. Reads end at once, and
readers lease nothing. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .counters import CacheCounters
from .device_tier import DeviceTier
from .placement import GUEST_SHARE
from .policy import Policy
from .ranking import Keys
from .residents import Origin, Residents
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
        self.residents = Residents(policy, CacheCounters())
        self.max_experts = min(max_experts or n_resident, n_resident)
        self.max_guests = max(1, n_resident // GUEST_SHARE)
        self._n_free = n_resident

    def window(self, keys: Keys) -> int:
        """Bring one layer's keys in, at most `max_experts`; return how many were read."""
        residents = self.residents
        residents.use(keys)
        absent: list[int] = keys[~self.resident[keys]].tolist()
        n_over = len(absent) - self._n_free
        if n_over > 0:
            self._evict(residents.victims(n_over, frozenset(keys.tolist())))
        self._admit(absent)
        return len(absent)

    def stream(self, keys: Keys) -> int:
        """Let a chunk's keys of one layer through, at most `max_guests`; return how many were read.

        Guests of before leave first, the last come first, then as many others as guests may take.
        """
        residents = self.residents
        residents.use(keys, as_stream=True)
        absent: list[int] = keys[~self.resident[keys]].tolist()
        n_over = len(absent) - self._n_free
        if n_over > 0:
            kept = frozenset(keys.tolist())
            leaving = residents.last_guests(n_over, kept)
            leaving += residents.victims(n_over - len(leaving), kept.union(leaving))
            self._evict(leaving)
        for key in absent:
            residents.expect(key, Origin.STREAM)
        self._admit(absent)
        return len(absent)

    def _evict(self, victims: list[int]) -> None:
        for key in victims:
            self.residents.evict(key)
        self.resident[victims] = False
        self._n_free += len(victims)

    def _admit(self, keys: list[int]) -> None:
        for key in keys:
            self.residents.admit(key)
        self.resident[keys] = True
        self._n_free -= len(keys)


def replay(trace: RoutingTrace, arena: ArenaTier, device: DeviceTier | None = None) -> Replayed:
    """Run all steps through the caches, which may hold something already, and count."""
    n_experts = trace.shape.n_experts
    counted = Replayed.blank(len(trace))
    for number, keys in enumerate(trace.steps()):
        is_token = bool(trace.is_token[number])
        enter, most = (
            (arena.window, arena.max_experts) if is_token else (arena.stream, arena.max_guests)
        )
        wanted = keys if device is None else keys[~device.resident[keys]]
        counted.arena_picks[number] = len(wanted)
        entered: list[Keys] = []
        for layer_keys in _groups(arena.resident, wanted, n_experts, most):
            counted.misses[number] += enter(layer_keys)
            counted.bursts[number] += 1
            entered.append(layer_keys)
        arena.residents.use(_without(keys, entered), as_stream=not is_token)
        if device is not None:
            device.end_step(keys, wanted[arena.resident[wanted]])
    return counted


def _groups(resident: NDArray[np.bool_], keys: Keys, n_experts: int, most: int) -> Iterator[Keys]:
    """Yield groups of at most `most` keys of one layer in which one is absent when they come."""
    place = 0
    while place < len(keys):
        absent = np.flatnonzero(~resident[keys[place:]])
        if not len(absent):
            return
        first = place + int(absent[0])
        layer = int(keys[first]) // n_experts
        begin, end = np.searchsorted(keys, (layer * n_experts, (layer + 1) * n_experts)).tolist()
        for group in range(max(begin, place), end, most):
            layer_keys = keys[group : min(group + most, end)]
            if not resident[layer_keys].all():
                yield layer_keys
        place = end


def _without(keys: Keys, parts: list[Keys]) -> Keys:
    """The ascending keys that are in none of the ascending, disjoint parts."""
    if not parts:
        return keys
    left = np.ones(len(keys), np.bool_)
    left[np.searchsorted(keys, np.concatenate(parts))] = False
    return keys[left]
