"""A model of the engine's device cache, for simulation beside the arena.

It holds its residents by LFU with dynamic aging. At a step's end picks that only the arena holds
are promoted, the best first, where they beat the device's victim by a margin, and at most so many a
step; a device that is not full takes all. Then the tier bytes are written. Source: DESIGN.md
section 2.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .policy import LfuAging
from .ranking import Keys
from .tiers import ABSENT, ON_DEVICE, UPPER_HALF

MOST_PROMOTIONS = 8  # a step
MARGIN = 1.0  # by which a score must beat the victim's: one use


class DeviceTier:
    """Which keys are on the device, and what it tells the arena about them."""

    def __init__(
        self,
        n_keys: int,
        n_slots: int,
        *,
        most_promotions: int = MOST_PROMOTIONS,
        margin: float = MARGIN,
    ) -> None:
        self.n_slots = n_slots
        self.resident = np.zeros(n_keys, np.bool_)
        self.tier = np.zeros(n_keys, np.uint8)
        self.n_promoted = 0
        self._policy = LfuAging(n_keys)
        self._n_resident = 0
        self._most = most_promotions
        self._margin = margin

    def end_step(self, keys: Keys, promotable: Keys) -> None:
        """Count a step's keys; promote among those that are in the arena and not here."""
        if not self.n_slots:
            return
        self._policy.use(keys)
        if not len(promotable):
            return
        scores = self._policy.scores(promotable)
        best = promotable[np.argsort(-scores, kind="stable")].tolist()
        n_free = self.n_slots - self._n_resident
        for key in best[:n_free]:
            self._enter(key)
        for key in best[n_free : n_free + self._most]:
            (victim,) = self._policy.victims(1, ())
            if self._policy.figures(key)[0] < self._policy.figures(victim)[0] + self._margin:
                break
            self._policy.evict(victim)
            self.resident[victim] = False
            self._n_resident -= 1
            self._enter(key)
        self._write_tier()

    def _enter(self, key: int) -> None:
        self._policy.admit(key)
        self.resident[key] = True
        self._n_resident += 1
        self.n_promoted += 1

    def _write_tier(self) -> None:
        residents = self._policy.residents()
        scores, last_uses = self._policy.scores(residents), self._policy.last_uses(residents)
        self.tier[:] = tier_bytes(residents, scores + 1e-9 * last_uses, len(self.tier))


def tier_bytes(residents: Keys, ranks: NDArray[np.float64], n_keys: int) -> NDArray[np.uint8]:
    """Return a byte a key: UPPER_HALF for the half of the residents with the highest ranks."""
    tier = np.full(n_keys, ABSENT, np.uint8)
    tier[residents] = ON_DEVICE
    n_lower = (len(residents) + 1) // 2
    if n_lower < len(residents):
        tier[residents[np.argpartition(ranks, n_lower)[n_lower:]]] = UPPER_HALF
    return tier
