"""Watches streamed text for stop strings and holds back what may still become one.

Invariants: the text let through and the place of the stop do not depend on how the text was
cut; the stop string that is completed first wins, and the longest of those that end there.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Feed text piece by piece; what is safe to show comes back.

    stops   the strings that end the text; an empty one raises ValueError
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string is empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that can be shown now; after a stop was found, nothing more."""
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        match = self._first_match(text)
        if match is not None:
            start, self.found = match
            self._held = ""
            return text[:start]
        keep = self._partial(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return what was held back: the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        starts = ((text.find(stop), stop) for stop in self._stops)
        found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _partial(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = min(max(len(stop) for stop in self._stops) - 1, len(text))
        for n in range(longest, 0, -1):
            end = text[len(text) - n :]
            if any(stop.startswith(end) for stop in self._stops):
                return n
        return 0
