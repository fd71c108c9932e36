"""So much of something in any stretch of time, whoever it is spent on."""

from __future__ import annotations

import time


class Allowance:
    """Begins anew when its period has passed; what is left over is not kept."""

    def __init__(self, amount: float, period_s: float) -> None:
        self._amount = amount
        self._period_s = period_s
        self._left = amount
        self._since = time.monotonic()

    def spend(self, amount: float) -> bool:
        """Take so much of it; False where less is left."""
        now = time.monotonic()
        if now - self._since >= self._period_s:
            self._since, self._left = now, self._amount
        if amount > self._left:
            return False
        self._left -= amount
        return True
