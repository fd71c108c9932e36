"""Leases: slots that keep their bytes because a reader holds them.

The quota is the daemon's, over all readers: leases held and leases promised to keys that are still
being read. Each lease counts, also a second one of the same slot. A reader has half of the quota at
most, so that one that never gives anything back leaves another as much.
"""

from __future__ import annotations


def share_of(quota: int) -> int:
    """How much of a quota one reader may have."""
    return max(quota // 2, min(quota, 1))


class LeaseBook:
    """Who holds which slot, how often."""

    def __init__(self, quota: int) -> None:
        self.quota = quota
        self.highest_quota = quota  # leases may outlive a larger one
        self._promised: dict[int, int] = {}  # by client
        self._held = 0
        self._pins: dict[int, int] = {}  # slot: leases of all clients
        self._clients: dict[int, dict[tuple[int, int], int]] = {}  # (slot, generation): leases

    @property
    def n_held(self) -> int:
        """Leases of all readers."""
        return self._held

    @property
    def n_promised(self) -> int:
        """Leases that keys being read will become."""
        return sum(self._promised.values())

    @property
    def share(self) -> int:
        """The most leases of one reader."""
        return share_of(self.quota)

    @property
    def pins(self) -> dict[int, int]:
        """Leased slots; only to look at."""
        return self._pins

    def set_quota(self, quota: int) -> None:
        """Change the quota; what is leased beyond it stays until it is released."""
        self.quota = quota
        self.highest_quota = max(self._held + self.n_promised, quota)

    def promise(self, client: int, n: int) -> bool:
        """Set `n` leases aside; False where quota or share do not allow that now."""
        promised = self._promised.get(client, 0) + n
        if promised + sum(self._clients.get(client, {}).values()) > self.share:
            return False
        if self._held + self.n_promised + n > self.quota:
            return False
        self._promised[client] = promised
        return True

    def withdraw(self, client: int, n: int) -> None:
        """Take `n` promises back."""
        left = self._promised.pop(client, 0) - n
        assert left >= 0, "more promises taken back than made"
        if left:
            self._promised[client] = left

    def take(self, client: int, slot: int, generation: int) -> None:
        """Turn a promise into a lease."""
        self.withdraw(client, 1)
        self._held += 1
        self._pins[slot] = self._pins.get(slot, 0) + 1
        mine = self._clients.setdefault(client, {})
        mine[slot, generation] = mine.get((slot, generation), 0) + 1

    def drop(self, client: int, slot: int, generation: int) -> bool:
        """End one lease; False where the client holds none of that slot and generation."""
        mine = self._clients.get(client, {})
        if (slot, generation) not in mine:
            return False
        self._forget(mine, slot, generation, 1)
        if not mine:
            del self._clients[client]
        return True

    def drop_client(self, client: int) -> int:
        """End all leases of a client; returns how many."""
        mine = self._clients.pop(client, {})
        n = sum(mine.values())
        for (slot, generation), count in list(mine.items()):
            self._forget(mine, slot, generation, count)
        return n

    def _forget(self, mine: dict[tuple[int, int], int], slot: int, generation: int, n: int) -> None:
        mine[slot, generation] -= n
        if not mine[slot, generation]:
            del mine[slot, generation]
        self._held -= n
        self._pins[slot] -= n
        if not self._pins[slot]:
            del self._pins[slot]
