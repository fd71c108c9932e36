"""Residents in order of (score, last use), and the lowest of them at a small, even cost.

All keys' figures stand in numpy arrays, so counting many uses is a handful of array operations.
The lowest residents stand in a small heap as well: `_front` holds an entry for every resident
whose rank is at most `_mark` (and stale entries, known by a rank that is no longer the key's). One
pass over the arrays fills it again when it runs dry, for FRONT victims at a time; no call costs
more than one such pass, however many slots there are.
"""

from __future__ import annotations

import heapq
from collections.abc import Container
from typing import Any

import numpy as np
from numpy.typing import NDArray

FRONT = 128

Keys = NDArray[np.int64]
Rank = tuple[float, int, int]

_LOWEST = (-np.inf, -1)
_HIGHEST = (np.inf, -1)


class Ranking:
    """A set of residents, each with a score and the tick of its last use; no two share a tick."""

    def __init__(self, n_keys: int) -> None:
        self._resident = np.zeros(n_keys, np.bool_)
        self._score = np.zeros(n_keys, np.float64)
        self._last_use = np.zeros(n_keys, np.int64)
        self._front: list[Rank] = []
        self._mark: tuple[float, int] = _LOWEST
        self._tick = 0
        self._n_residents = 0

    def __len__(self) -> int:
        return self._n_residents

    def __contains__(self, key: int) -> bool:
        return bool(self._resident[key])

    @property
    def residents(self) -> Keys:
        """The resident keys, ascending."""
        return np.flatnonzero(self._resident)

    def score(self, key: int) -> float:
        """The last score that was set, of a resident or not."""
        return float(self._score[key])

    def last_use(self, key: int) -> int:
        """The tick of the last use; 0 = never."""
        return int(self._last_use[key])

    def scores(self, keys: Keys) -> NDArray[np.float64]:
        """`score` of many keys."""
        return self._score[keys]

    def last_uses(self, keys: Keys) -> Keys:
        """`last_use` of many keys."""
        return self._last_use[keys]

    @property
    def tick(self) -> int:
        """The last tick given out; uses get the next ones."""
        return self._tick

    def use(self, keys: Keys, scores: NDArray[np.float64]) -> None:
        """Set the keys' scores and give them new ticks, in their order. No key twice."""
        self._score[keys] = scores
        first = self._tick + 1
        self._tick += len(keys)
        self._last_use[keys] = np.arange(first, self._tick + 1)
        low = self._resident[keys] & (scores < self._mark[0])
        if low.any():
            for key in keys[low].tolist():
                self._offer(key)

    def stamp(self, key: int) -> int:
        """The tick of the key's last use; a key that was never used gets a new one."""
        if not self._last_use[key]:
            self._tick += 1
            self._last_use[key] = self._tick
        return int(self._last_use[key])

    def add(self, key: int, score: float) -> None:
        """Make `key` resident. Its tick stays, so the order of additions orders nothing."""
        self.stamp(key)
        self._score[key] = score
        self._n_residents += not self._resident[key]
        self._resident[key] = True
        self._offer(key)

    def remove(self, key: int) -> None:
        """`key` is no longer resident; its last figures stay readable."""
        self._n_residents -= bool(self._resident[key])
        self._resident[key] = False

    @property
    def all_last_uses(self) -> Keys:
        """Ticks of every key's last use; only to look at."""
        return self._last_use

    def recall(self, last_uses: Keys) -> None:
        """Take over every key's last use; once, when empty."""
        np.maximum(last_uses, 0, out=self._last_use)
        self._tick = int(self._last_use.max(initial=0))

    def restore(self, residents: list[tuple[int, float, int]]) -> None:
        """Take (key, score, last_use) of many; ticks are given anew in the order of last use."""
        for key, score, _ in sorted(residents, key=lambda entry: (entry[2], entry[0])):
            self.add(key, score)

    def lowest(self, n: int, excluded: Container[int]) -> list[int]:
        """The `n` lowest residents that are not excluded, the lowest first; fewer if there are."""
        chosen: list[int] = []
        seen: list[Rank] = []
        last = None
        while len(chosen) < n:
            if not self._front and not self._fill():
                break
            entry = heapq.heappop(self._front)
            key = entry[2]
            if entry == last or entry != self._rank(key) or not self._resident[key]:
                continue
            seen.append(entry)
            last = entry
            if key not in excluded:
                chosen.append(key)
        for entry in seen:
            heapq.heappush(self._front, entry)
        return chosen

    def lowest_few(self, n: int) -> Keys:
        """The `n` lowest residents, ascending, by one pass over the arrays; fewer if there are."""
        keys: Keys = np.flatnonzero(self._resident)
        chosen = _lowest_of(self._score[keys], self._last_use[keys], min(n, len(keys)))
        lowest: Keys = keys[chosen]
        return lowest

    def _rank(self, key: int) -> Rank:
        return float(self._score[key]), int(self._last_use[key]), key

    def _offer(self, key: int) -> None:
        """Put a resident whose rank is new into the front, if that is where it belongs."""
        rank = self._rank(key)
        if rank[:2] > self._mark:
            return
        if len(self._front) < 4 * FRONT:
            heapq.heappush(self._front, rank)
        else:  # mostly stale entries: begin anew with the next `lowest`
            self._front.clear()
            self._mark = _LOWEST

    def _fill(self) -> bool:
        """Bring the next FRONT residents above the mark to the front; False: there are none."""
        mark_score, mark_tick = self._mark
        keys: Keys = np.flatnonzero(self._resident & (self._score >= mark_score))
        score, tick = self._score[keys], self._last_use[keys]
        above = (score > mark_score) | (tick > mark_tick)
        if not above.all():
            keys, score, tick = keys[above], score[above], tick[above]
        if len(keys) > FRONT:
            chosen = _lowest_of(score, tick, FRONT)
            keys, score, tick = keys[chosen], score[chosen], tick[chosen]
            self._mark = float(score[-1]), int(tick[-1])
        else:
            self._mark = _HIGHEST
        self._front.extend(zip(score.tolist(), tick.tolist(), keys.tolist(), strict=True))
        heapq.heapify(self._front)
        return len(keys) > 0


def _lowest_of(score: NDArray[np.float64], tick: Keys, n: int) -> NDArray[Any]:
    """Positions of the `n` lowest (score, tick), ascending, by selection and not by sorting all."""
    if n == 0:
        return np.zeros(0, np.int64)
    bound = np.partition(score, n - 1)[n - 1]
    below = np.flatnonzero(score < bound)
    tied = np.flatnonzero(score == bound)
    n_tied = n - len(below)
    if len(tied) > n_tied:
        tied = tied[np.argpartition(tick[tied], n_tied - 1)[:n_tied]]
    chosen = np.concatenate((below, tied))
    return chosen[np.lexsort((tick[chosen], score[chosen]))]
