"""The rule of two tiers: where the device cache is large, the arena keeps what that does not.

Compute writes one advisory byte a key into the arena. A key in the upper half of the device's
scores will stay there for long, so its copy in the arena is the first to go; without that the
arena becomes a mirror of a device cache of like size. Beside a small device cache the rule would
cost more than it saves, so it is off below 0.4 device keys a resident of the arena.

The bytes come from another process without any order, so each call looks once and believes nothing
else: whatever they say, some resident goes first. Source: DESIGN.md section 2.
"""

from __future__ import annotations

from collections.abc import Container

import numpy as np
from numpy.typing import NDArray

from .policy import Policy, PolicyMemory
from .ranking import Keys

ABSENT, ON_DEVICE, UPPER_HALF = 0, 1, 2
LEAST_DEVICE_SHARE = 0.4


class TieredPolicy:
    """Another policy's order, behind the residents that the device surely keeps."""

    def __init__(
        self,
        policy: Policy,
        tier: NDArray[np.uint8],
        *,
        least_device_share: float = LEAST_DEVICE_SHARE,
    ) -> None:
        """Stand before `policy`.

        tier                a view of the bytes, one a key
        least_device_share  keys on the device a resident from which on the rule holds
        """
        self.name = policy.name
        self._policy = policy
        self._tier = tier.reshape(-1)
        self._least_share = least_device_share
        self._rule_held = False  # when victims were last chosen

    def use(self, keys: Keys) -> None:
        """Count one use of each key."""
        self._policy.use(keys)

    def admit(self, key: int) -> None:
        """`key` is resident from now on."""
        self._policy.admit(key)

    def evict(self, key: int) -> None:
        """`key` leaves; one that the device keeps says nothing about what the others are worth."""
        if self._rule_held and self._tier[key] == UPPER_HALF:
            self._policy.drop(key)
        else:
            self._policy.evict(key)

    def drop(self, key: int) -> None:
        """`key` is no longer resident for another reason."""
        self._policy.drop(key)

    def victims(self, n: int, excluded: Container[int]) -> list[int]:
        """Residents in the device's upper half by their scores, then the policy's own choice."""
        n_device = np.count_nonzero(self._tier)
        self._rule_held = False
        if not n_device:
            return self._policy.victims(n, excluded)
        keys = self._policy.residents()
        self._rule_held = bool(n_device >= self._least_share * len(keys))
        if not self._rule_held:
            return self._policy.victims(n, excluded)
        upper = keys[self._tier[keys] == UPPER_HALF]
        order = np.lexsort((self._policy.last_uses(upper), self._policy.scores(upper)))
        first: list[int] = []
        for key in upper[order].tolist():
            if len(first) == n:
                return first
            if key not in excluded:
                first.append(key)
        if len(first) < n:
            first += self._policy.victims(n - len(first), _Either(excluded, frozenset(first)))
        return first

    def scores(self, keys: Keys) -> NDArray[np.float64]:
        """The policy's own."""
        return self._policy.scores(keys)

    def last_uses(self, keys: Keys) -> Keys:
        """The policy's own."""
        return self._policy.last_uses(keys)

    def figures(self, key: int) -> tuple[float, int]:
        """(score, last use) of one key."""
        return self._policy.figures(key)

    def residents(self) -> Keys:
        """The resident keys, ascending."""
        return self._policy.residents()

    def restore(self, residents: list[tuple[int, float, int]]) -> None:
        """Take a former daemon's residents."""
        self._policy.restore(residents)

    def remember(self) -> PolicyMemory:
        """The other policy's."""
        return self._policy.remember()

    def recall(self, memory: PolicyMemory) -> None:
        """For the other policy."""
        self._policy.recall(memory)


class _Either(Container[int]):
    """What is in one of two containers."""

    def __init__(self, one: Container[int], other: frozenset[int]) -> None:
        self._one = one
        self._other = other

    def __contains__(self, key: object) -> bool:
        return key in self._other or key in self._one
