"""How many experts each waiting layer of a replayed trace reads: what the sums hide. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .device_tier import DeviceTier
from .policy import Policy, make_policy
from .ranking import Keys
from .replay import ArenaTier, replay
from .routing_trace import RoutingTrace
from .simulate import Setting
from .tiers import TieredPolicy

POLICY = "lfu-da"


@dataclass(frozen=True, slots=True)
class Bursts:
    """What the steps of a trace waited for."""

    step: NDArray[np.int64]  # [n_bursts], the step that a burst belongs to, ascending
    n_misses: NDArray[np.int64]  # [n_bursts], experts that it read
    arena_picks: NDArray[np.int64]  # [n_steps], picks that were not on the device

    def of(self, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sizes of the bursts of some steps."""
        return self.n_misses[np.isin(self.step, steps)]


class _NotingTier(ArenaTier):
    """An arena that notes how many experts each layer read."""

    def __init__(self, n_keys: int, n_resident: int, policy: Policy, max_experts: int) -> None:
        super().__init__(n_keys, n_resident, policy, max_experts)
        self.sizes: list[int] = []

    def window(self, keys: Keys) -> int:
        self.sizes.append(super().window(keys))
        return self.sizes[-1]

    def stream(self, keys: Keys) -> int:
        self.sizes.append(super().stream(keys))
        return self.sizes[-1]


def bursts_of(trace: RoutingTrace, setting: Setting) -> Bursts:
    """Replay a trace from empty caches with the daemon's default policy."""
    n_keys = trace.shape.n_keys
    policy = make_policy(POLICY, n_keys)
    device = DeviceTier(n_keys, setting.n_device) if setting.n_device else None
    if device is not None:
        policy = TieredPolicy(policy, device.tier)
    tier = _NotingTier(n_keys, setting.n_resident, policy, setting.max_experts)
    counted = replay(trace, tier, device)
    step = np.repeat(np.arange(len(trace)), counted.bursts)
    return Bursts(step, np.array(tier.sizes, np.int64), counted.arena_picks)
