"""Which key leaves the arena first. Pure; over flat keys, layer * n_experts + expert.

Slot numbers are unknown here, so they can order nothing. Equal scores go by last use.
"""

from __future__ import annotations

import math
import random
from collections.abc import Container
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ConfigError

from .ranking import Keys, Ranking

MOST_USES = 16.0
OLDEST_SHARE = 0.08


@dataclass(frozen=True, slots=True)
class PolicyMemory:
    """What a policy knows beyond its residents' figures; arrays over all keys."""

    age: float  # L of the aging, 0 where a policy has none
    counts: NDArray[np.float64]
    last_uses: Keys  # ticks, 0 = never


class Policy(Protocol):
    """An order of eviction."""

    name: str

    def use(self, keys: Keys) -> None:
        """Count one use of each key, resident or not; no key twice."""

    def admit(self, key: int) -> None:
        """`key` is resident from now on, with the figures of its last use."""

    def evict(self, key: int) -> None:
        """`key` was chosen as a victim and is no longer resident."""

    def drop(self, key: int) -> None:
        """`key` is no longer resident for another reason; that says nothing about the others."""

    def victims(self, n: int, excluded: Container[int]) -> list[int]:
        """Up to `n` residents to give up, the first to go first, none of `excluded`."""

    def scores(self, keys: Keys) -> NDArray[np.float64]:
        """What the slot headers show: of two residents the lower goes first."""

    def last_uses(self, keys: Keys) -> Keys:
        """Ticks of the last uses (or of the admission), 0 = never."""

    def figures(self, key: int) -> tuple[float, int]:
        """(score, last use) of one key."""

    def residents(self) -> Keys:
        """The resident keys, ascending."""

    def restore(self, residents: list[tuple[int, float, int]]) -> None:
        """Take (key, score, last_use) of a former daemon's residents; once, when empty."""

    def remember(self) -> PolicyMemory:
        """What a later daemon's policy of this name is to know; views, to be copied at once."""

    def recall(self, memory: PolicyMemory) -> None:
        """Take over what an earlier one remembered; once, before `restore`."""


class LfuAging:
    """Least frequently used with dynamic aging: score = L + c, as of the key's last use.

    On use c = min(16, c + 1). On eviction L = the victim's score and its c is halved. c outlives
    residence. Source: DESIGN.md section 8.
    """

    name = "lfu-da"

    def __init__(self, n_keys: int) -> None:
        self._ranking = Ranking(n_keys)
        self._count = np.zeros(n_keys, np.float64)
        self._age = 0.0
        self._recalled = False

    def use(self, keys: Keys) -> None:
        """Raise the counts and set the scores anew."""
        count = np.minimum(MOST_USES, self._count[keys] + 1.0)
        self._count[keys] = count
        self._ranking.use(keys, self._age + count)

    def admit(self, key: int) -> None:
        """Enter with what the key earned before."""
        self._ranking.add(key, self._age + float(self._count[key]))

    def evict(self, key: int) -> None:
        """Age everybody by what the victim had."""
        self._ranking.remove(key)
        self._age = self._ranking.score(key)
        self._count[key] *= 0.5

    def drop(self, key: int) -> None:
        """Nobody ages, and the key keeps what it earned."""
        self._ranking.remove(key)

    def victims(self, n: int, excluded: Container[int]) -> list[int]:
        """The lowest scores; of equal ones the longest unused."""
        return self._ranking.lowest(n, excluded)

    def scores(self, keys: Keys) -> NDArray[np.float64]:
        """L + c of the last use."""
        return self._ranking.scores(keys)

    def last_uses(self, keys: Keys) -> Keys:
        """Ticks of the last uses."""
        return self._ranking.last_uses(keys)

    def figures(self, key: int) -> tuple[float, int]:
        """(score, last use) of one key."""
        return self._ranking.score(key), self._ranking.last_use(key)

    def residents(self) -> Keys:
        """The resident keys, ascending."""
        return self._ranking.residents

    def restore(self, residents: list[tuple[int, float, int]]) -> None:
        """Take the scores over. Without a memory L is the lowest, c what a score has above it."""
        if not residents:
            return
        if not self._recalled:
            self._age = min(score for _, score, _ in residents)
            for key, score, _ in residents:
                self._count[key] = min(MOST_USES, score - self._age)
        self._ranking.restore(residents)

    def remember(self) -> PolicyMemory:
        """L, and c and last use of every key."""
        return PolicyMemory(self._age, self._count, self._ranking.all_last_uses)

    def recall(self, memory: PolicyMemory) -> None:
        """Go on from there."""
        self._recalled = True
        self._age = max(0.0, memory.age)
        np.clip(memory.counts, 0.0, MOST_USES, out=self._count)
        self._ranking.recall(memory.last_uses)


class Lru:
    """Least recently used; the score is the tick of the last use."""

    name = "lru"

    def __init__(self, n_keys: int) -> None:
        self._ranking = Ranking(n_keys)

    def use(self, keys: Keys) -> None:
        """Move the keys to the end."""
        first = self._ranking.tick + 1
        self._ranking.use(keys, np.arange(first, first + len(keys), dtype=np.float64))

    def admit(self, key: int) -> None:
        """Enter where the last use puts the key."""
        self._ranking.add(key, float(self._ranking.stamp(key)))

    def evict(self, key: int) -> None:
        """Forget the key."""
        self._ranking.remove(key)

    def drop(self, key: int) -> None:
        """Forget the key."""
        self.evict(key)

    def victims(self, n: int, excluded: Container[int]) -> list[int]:
        """The longest unused."""
        return self._ranking.lowest(n, excluded)

    def scores(self, keys: Keys) -> NDArray[np.float64]:
        """Ticks of the last uses."""
        return self._ranking.scores(keys)

    def last_uses(self, keys: Keys) -> Keys:
        """Ticks of the last uses."""
        return self._ranking.last_uses(keys)

    def figures(self, key: int) -> tuple[float, int]:
        """(score, last use) of one key."""
        return self._ranking.score(key), self._ranking.last_use(key)

    def residents(self) -> Keys:
        """The resident keys, ascending."""
        return self._ranking.residents

    def restore(self, residents: list[tuple[int, float, int]]) -> None:
        """Take the order over; ticks count anew."""
        for key, _, _ in sorted(residents, key=lambda entry: (entry[2], entry[0])):
            self.admit(key)

    def remember(self) -> PolicyMemory:
        """The last uses."""
        last_uses = self._ranking.all_last_uses
        return PolicyMemory(0.0, np.zeros(len(last_uses)), last_uses)

    def recall(self, memory: PolicyMemory) -> None:
        """Go on from there."""
        self._ranking.recall(memory.last_uses)


class LruRandom(Lru):
    """LRU with a random victim among the oldest 8 %, so that a loop does not defeat it.

    The victims come out of a pool: the oldest 8 % as of one pass over all residents, without those
    used or gone since. What is left of it is still the oldest of all; once an eighth is missing,
    the next pass follows. The dice have a fixed seed.
    """

    name = "lru-random"

    def __init__(self, n_keys: int) -> None:
        super().__init__(n_keys)
        self._dice = random.Random(0)
        self._pool: list[int] = []
        self._pooled = np.zeros(n_keys, np.bool_)
        self._n_pooled = 0
        self._newest_tick = 0  # of the pool

    def use(self, keys: Keys) -> None:
        """Move the keys to the end, out of the pool."""
        super().use(keys)
        pooled = self._pooled[keys]
        if pooled.any():
            self._n_pooled -= int(pooled.sum())
            self._pooled[keys] = False

    def admit(self, key: int) -> None:
        """Enter where the last use puts the key; where that is in the pool, a pass is due."""
        super().admit(key)
        if self._ranking.last_use(key) <= self._newest_tick:
            self._n_pooled = -1

    def evict(self, key: int) -> None:
        """Forget the key."""
        super().evict(key)
        self._n_pooled -= bool(self._pooled[key])
        self._pooled[key] = False

    def victims(self, n: int, excluded: Container[int]) -> list[int]:
        """Draw from the pool; where that is too small, the oldest others follow."""
        self._renew_pool()
        pool = self._pool
        chosen: list[int] = []
        passed: list[int] = []
        while pool and len(chosen) < n:
            place = self._dice.randrange(len(pool))
            key, pool[place] = pool[place], pool[-1]
            pool.pop()
            if self._pooled[key]:
                (passed if key in excluded else chosen).append(key)
        pool += chosen + passed
        if len(chosen) < n:
            n_more = n - len(chosen)
            others = self._ranking.lowest(n + len(chosen), excluded)
            chosen += [key for key in others if key not in chosen][:n_more]
        return chosen

    def _renew_pool(self) -> None:
        wanted = math.ceil(OLDEST_SHARE * len(self._ranking))
        if 7 * wanted <= 8 * self._n_pooled <= 8 * wanted:
            return
        oldest = self._ranking.lowest_few(wanted)
        self._pool = oldest.tolist()
        self._pooled.fill(False)
        self._pooled[oldest] = True
        self._n_pooled = len(oldest)
        self._newest_tick = self._ranking.last_use(self._pool[-1]) if self._pool else 0


POLICIES: dict[str, type[LfuAging | Lru]] = {
    policy.name: policy for policy in (LfuAging, Lru, LruRandom)
}


def make_policy(name: str, n_keys: int) -> Policy:
    """Return the policy called `lfu-da`, `lru` or `lru-random`. Raises ConfigError otherwise."""
    if name not in POLICIES:
        raise ConfigError(f"policy is {name!r}, wanted one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name](n_keys)
