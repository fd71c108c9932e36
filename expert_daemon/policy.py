"""Which key leaves the arena first. Pure; over flat keys, layer * n_experts + expert."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol


class Policy(Protocol):
    """Order of eviction. Slot numbers are unknown here, so they can order nothing."""

    def use(self, key: int) -> None:
        """Count one use of `key`, resident or not."""

    def admit(self, key: int) -> None:
        """`key` is resident from now on and may be a victim."""

    def evict(self, key: int) -> None:
        """`key` is no longer resident."""

    def candidates(self) -> Iterator[int]:
        """Yield the resident keys, the first to go first; change nothing while iterating."""

    def score(self, key: int) -> float:
        """What the slot header shows: higher stays longer."""

    def last_use(self, key: int) -> int:
        """Tick of the last use or admission, 0 = never."""

    def restore(self, residents: list[tuple[int, float, int]]) -> None:
        """Take (key, score, last_use) of a former daemon's residents; called once, when empty."""


def make_policy(name: str, n_keys: int) -> Policy:
    """Return the policy called `lfu-da` or `lru`. Raises ConfigError for another name."""
    raise NotImplementedError(name)
