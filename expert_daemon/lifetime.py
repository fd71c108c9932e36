"""Counters of the arena's whole life, over restarts of its daemon, in words of the arena.

Written twice a second: a daemon that is killed loses the rest of its last half second.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

# The order is the layout: word 0 counts the daemons, then these. New ones go at the end.
WORDS = (
    "n_requests",
    "n_requested",
    "n_hits",
    "n_adopted",
    "n_misses",
    "n_no_slot",
    "n_uses",
    "n_fetch_hits",
    "n_fetch_misses",
    "n_loads",
    "n_hedges",
    "n_published",
    "n_failed",
    "n_evictions",
    "n_retirements",
    "reads",
    "bytes_read",
    "read_ns",
    "read_errors",
    "slow_reads",
    "lost_reads",
    "rows",
    "row_errors",
)


class Lifetime:
    """What earlier daemons counted, and this one since it started."""

    def __init__(self, words: NDArray[np.uint64], *, is_adopted: bool) -> None:
        """`words` are the arena's counters, u64; a new arena's are not believed."""
        if not is_adopted:
            words.fill(0)
        self._words = words
        self._words[0] += np.uint64(1)
        self._before = words[1 : 1 + len(WORDS)].copy()

    def note(self, values: Mapping[str, int | float | str]) -> None:
        """Write the totals; `values` are this daemon's own counts by name."""
        own = np.array([values.get(name, 0) for name in WORDS], np.uint64)
        self._words[1 : 1 + len(WORDS)] = self._before + own

    def values(self) -> dict[str, int]:
        """The totals by name, as last noted, each with `lifetime_` before it."""
        totals = self._words[1 : 1 + len(WORDS)].tolist()
        named = {f"lifetime_{name}": total for name, total in zip(WORDS, totals, strict=True)}
        return {"lifetime_daemons": int(self._words[0]), **named}
