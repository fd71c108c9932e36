"""Which Engram rows stand in which places of a bounded cache. Pure, and by whole batches.

A place belongs to a set of WAYS; a row's key says which set. In a set the row with the lowest
score leaves first, score = level + uses as of the last use; a victim's score becomes the set's
level. So what is asked for again stays, and a long prompt passes through. It is the rule for
experts of DESIGN.md section 8, set by set.

Invariants: no key stands in two places; a new key is found from `take` on, so the caller writes
its bytes under the same lock.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

WAYS = 8
MOST_USES = 16
_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(32)

Integers = npt.NDArray[np.int64]


class RowCache:
    """Places 0 to n_places - 1 for int64 keys from 0."""

    def __init__(self, n_places: int) -> None:
        """Use as many of `n_places` as whole sets need."""
        self._n_sets = n_places // WAYS
        n_used = self._n_sets * WAYS
        self._keys = np.full((self._n_sets, WAYS), -1, np.int64)
        self._score = np.zeros(n_used, np.int64)
        self._uses = np.zeros(n_used, np.uint8)
        self._level = np.zeros(self._n_sets, np.int64)
        self.n_places = n_used
        self.n_held = 0

    def find(self, keys: Integers) -> Integers:
        """Return the place of each key, -1 where it has none, and count a use of those found."""
        if not self._n_sets:
            return np.full(len(keys), -1, np.int64)
        sets = self._sets_of(keys)
        match = self._keys[sets] == keys[:, None]
        places = np.where(match.any(axis=1), sets * WAYS + match.argmax(axis=1), -1)
        self._use(places if (places >= 0).all() else places[places >= 0])
        return places

    def take(self, keys: Integers) -> Integers:
        """Give absent keys, none twice, places whose rows they drive out; -1 where there is none.

        A set gives no more than its WAYS to one call.
        """
        places = np.full(len(keys), -1, np.int64)
        if not self._n_sets or not len(keys):
            return places
        sets = self._sets_of(keys)
        order = np.argsort(sets, kind="stable")
        ordered = sets[order]
        begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
        rank = np.arange(len(ordered)) - np.repeat(begins, np.diff(begins, append=len(ordered)))
        fits = rank < WAYS
        order, ordered, rank = order[fits], ordered[fits], rank[fits]
        ways = np.argsort(self._score.reshape(-1, WAYS)[ordered], axis=1, kind="stable")
        taken = ordered * WAYS + np.take_along_axis(ways, rank[:, None], axis=1)[:, 0]
        held = self._keys.reshape(-1)
        np.maximum.at(self._level, ordered, self._score[taken])
        self.n_held += int((held[taken] < 0).sum())
        held[taken] = keys[order]
        self._uses[taken] = 0
        self._use(taken)
        places[order] = taken
        return places

    def _sets_of(self, keys: Integers) -> Integers:
        mixed = (keys.view(np.uint64) * _MIX) >> _SHIFT
        return (mixed % np.uint64(self._n_sets)).view(np.int64)

    def _use(self, places: Integers) -> None:
        uses = np.minimum(self._uses[places], MOST_USES - 1) + 1
        self._uses[places] = uses
        self._score[places] = self._level[places // WAYS] + uses
