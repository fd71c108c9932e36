"""The arena's policy section: what the eviction policy knows, for the next daemon.

Copied there twice a second; figures that are half a second old, or torn by a kill, cost a victim or
two and nothing else. u64 0 is the stamp of the shards (see arena.py), u64 1 a layout number, f64 2
the age, bytes 32 to 47 the policy's name; from byte 4096 on each key's count (f64), then each key's
last use (i64).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from protocol.arena.plan import POLICY_GLOBAL_BYTES

from .policy import Policy, PolicyMemory

LAYOUT = 1
MOST_TICKS = 1 << 62


class PolicySection:
    """Views of the section, u8."""

    def __init__(self, section: NDArray[np.uint8], n_keys: int) -> None:
        self._layout = section[8:16].view("<u8")
        self._age = section[16:24].view("<f8")
        self._name = section[32:48]
        keys = section[POLICY_GLOBAL_BYTES : POLICY_GLOBAL_BYTES + 16 * n_keys]
        self._counts = keys[: 8 * n_keys].view("<f8")
        self._last_uses = keys[8 * n_keys :].view("<i8")

    def save(self, policy: Policy) -> None:
        """Write what `policy` knows."""
        memory = policy.remember()
        self._name[:] = _name_bytes(policy.name)
        self._age[0] = memory.age
        self._counts[:] = memory.counts
        self._last_uses[:] = memory.last_uses
        self._layout[0] = LAYOUT

    def load(self, policy: Policy) -> bool:
        """Have `policy` recall what one of its name knew; False where there is no such memory."""
        same_name = bytes(self._name) == bytes(_name_bytes(policy.name))
        age = float(self._age[0])
        if int(self._layout[0]) != LAYOUT or not same_name or not math.isfinite(age):
            return False
        counts = np.nan_to_num(self._counts, nan=0.0, posinf=0.0, neginf=0.0)
        policy.recall(PolicyMemory(age, counts, np.clip(self._last_uses, 0, MOST_TICKS)))
        return True


def _name_bytes(name: str) -> NDArray[np.uint8]:
    return np.frombuffer(name.encode()[:16].ljust(16, b"\0"), np.uint8)
