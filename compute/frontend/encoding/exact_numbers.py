"""Numbers that the recipe library would round, carried past it.

The library holds numbers as 64-bit integers and floats, so a larger integer of a tool call comes
out rounded and an overflowing float turns the whole call into one string. Here each such number
is replaced by a 19-digit stand-in that occurs nowhere in the request, and put back in the prompt,
printed as Python prints it. Source: model specification, section 11, JSON form.
"""

from __future__ import annotations

import json
import math
from itertools import count
from typing import Any

_FIRST = 7_000_000_000_000_000_000  # 19 digits, within 64 bits


class ExactNumbers:
    """Hides numbers in one request's body and shows them again in its prompt."""

    def __init__(self, body: Any) -> None:
        self._written = json.dumps(body)
        self._next = count(_FIRST)
        self._shown: dict[str, str] = {}

    def hide(self, value: Any) -> Any:
        """Return a copy of `value` in which stand-ins replace what 64 bits do not hold."""
        if isinstance(value, dict):
            return {key: self.hide(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.hide(item) for item in value]
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        fits = -(2**63) <= value < 2**64 if isinstance(value, int) else math.isfinite(value)
        return value if fits else self._stand_in(value)

    def arguments(self, value: Any) -> Any:
        """Return a call's arguments as the text of a JSON object, numbers hidden.

        An object is written out, and text that holds the text of an object is unwrapped once. What
        is no object comes back as it is.
        """
        found = _parsed(value)
        if isinstance(found, str):
            found = _parsed(found)
        return json.dumps(self.hide(found)) if isinstance(found, dict) else value

    def show(self, text: str) -> str:
        """Return `text` with the numbers back in place."""
        for stand_in, number in self._shown.items():
            text = text.replace(stand_in, number)
        return text

    def _stand_in(self, value: float) -> int:
        number = next(n for n in self._next if str(n) not in self._written)
        self._shown[str(number)] = json.dumps(value)
        return number


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None
