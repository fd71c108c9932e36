"""Which of an expert's two copies is read: the one at home, or the mirror's.

Experts are dealt out so that each copy serves bytes in proportion to its measured rate; a key whose
one copy is bad is left to the other. Choosing and barring is done on the loop's thread, rates are
noted on the reader threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from .read_plan import Fragment

Key = tuple[int, int]  # layer, expert
Places = Callable[[Key], list[Fragment]]

HOME, MIRROR = 0, 1
COPY_NAMES = ("home", "mirror")
MEMORY = 31 / 32  # what a part read leaves of the weight of those before it
MIN_MEASURED = 8  # parts read of each copy, before that both count as equally fast
LEAST_SHARE = 1 / 16  # of the reads, so that a slow copy that recovers is noticed
UNKNOWN_NS_A_BYTE = 1.0  # what a read that failed is held to have cost, before any was measured


class CopyRates:
    """Bytes a second of each copy's recent reads, and whose turn it is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of the three below
        self._n_bytes = [0.0, 0.0]
        self._ns = [0.0, 0.0]
        self._n_measured = [0, 0]
        self._dealt = [0.0, 0.0]  # bytes that each copy had to serve, divided by its share

    def note(self, copy: int, n_bytes: int, ns: int) -> None:
        """A part was read in this time."""
        with self._lock:
            self._note(copy, n_bytes, ns)

    def note_failed(self, copy: int, n_bytes: int, ns: int) -> None:
        """A part was not read: the time that it would have taken has gone for nothing."""
        with self._lock:
            known, spent = self._n_bytes[copy], self._ns[copy]
            usual = spent / known if known else UNKNOWN_NS_A_BYTE
            self._note(copy, 0, max(ns, int(n_bytes * usual)))

    def _note(self, copy: int, n_bytes: int, ns: int) -> None:
        self._n_bytes[copy] = self._n_bytes[copy] * MEMORY + n_bytes
        self._ns[copy] = self._ns[copy] * MEMORY + max(ns, 1)
        self._n_measured[copy] += 1

    def rates(self) -> tuple[float, float]:
        """Bytes a second of each copy; 0: nothing was read."""
        with self._lock:
            home, mirror = (
                n_bytes / ns * 1e9 if ns else 0.0
                for n_bytes, ns in zip(self._n_bytes, self._ns, strict=True)
            )
        return home, mirror

    def shares(self) -> tuple[float, float]:
        """Which part of the bytes each copy is to serve; together 1."""
        home, mirror = self.rates()
        if min(self._n_measured) < MIN_MEASURED or home + mirror == 0:
            return 0.5, 0.5
        share = min(max(home / (home + mirror), LEAST_SHARE), 1 - LEAST_SHARE)
        return share, 1 - share

    def deal(self, n_bytes: int) -> int:
        """Return the copy whose turn it is, to serve this much."""
        copy = MIRROR if self._dealt[MIRROR] < self._dealt[HOME] else HOME
        self._dealt[copy] += n_bytes / self.shares()[copy]
        return copy


class Copies:
    """Where each key's copies are, which of them are good, and the order to try them in."""

    def __init__(self, home_of: Places, mirror_of: Places = lambda _: []) -> None:
        """`mirror_of` gives nothing for a key that has no second copy."""
        self._places = (home_of, mirror_of)
        self._bad: dict[Key, set[int]] = {}
        self._failed: dict[Key, int] = {}  # the copy that could not be read last
        self.rates = CopyRates()

    def fragments(self, key: Key, copy: int = HOME) -> list[Fragment]:
        """Where the bytes of one copy are."""
        return self._places[copy](key)

    def good(self, key: Key) -> list[int]:
        """The key's copies that are not known to be bad."""
        found = [HOME, MIRROR] if self._places[MIRROR](key) else [HOME]
        bad = self._bad.get(key)
        return found if bad is None else [copy for copy in found if copy not in bad]

    def order(self, key: Key, n_bytes: int, *, last: int | None = None) -> list[int]:
        """Return the copies to try, the best first; HOME alone where none is good.

        last  the copy to leave for the end, because it is slow now
        """
        good = self.good(key)
        if len(good) < 2:
            return good or [HOME]
        last = self._failed.get(key) if last is None else last
        first = self.rates.deal(n_bytes) if last is None else 1 - last
        return [first, 1 - first]

    def note_failed(self, key: Key, copy: int) -> None:
        """Try this copy last from now on, unless the other one fails too. On any thread."""
        self._failed[key] = copy

    def distrust(self, key: Key, copy: int) -> bool:
        """Read this copy no more; return whether another one is good."""
        self._bad.setdefault(key, set()).add(copy)
        return bool(self.good(key))

    def trust(self, key: Key) -> None:
        """Read all of the key's copies again."""
        self._bad.pop(key, None)
        self._failed.pop(key, None)
