"""What caches of given sizes would make of a routing trace: hits, reads and predicted stalls.

Pure. A figure is the mean over the tokens behind the warm-up; chunks of a prompt are replayed but
not counted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.arena.layout import PIECES, ArenaLayout
from protocol.errors import ConfigError
from protocol.sizes import parse_size

from .budget import MOST_FREE, plan_arena, slot_budget
from .device_tier import DeviceTier
from .optimum import optimum
from .policy import make_policy
from .replay import ArenaTier, Replayed, replay
from .routing_trace import RoutingTrace, TraceShape
from .tiers import LEAST_DEVICE_SHARE, TieredPolicy

OPTIMUM = "optimum"
TIER_RULES = {"auto": LEAST_DEVICE_SHARE, "on": 0.0, "off": math.inf}
WARM_UP_SHARE = 4  # one token in so many, from the beginning, where nothing else is said


@dataclass(frozen=True, slots=True)
class Setting:
    """The caches of one replay."""

    arena_bytes: int
    n_slots: int
    n_resident: int  # slots that hold experts: all but the free pool
    max_experts: int  # of one MissRequest
    n_device: int = 0  # slots of the device cache; 0: there is none
    tier_rule: str = "auto"  # of TIER_RULES


@dataclass(frozen=True, slots=True)
class Disk:
    """What one burst of reads costs: a latency, then its bytes at the bandwidth."""

    bytes_per_s: float
    latency_ms: float


@dataclass(frozen=True, slots=True)
class Figures:
    """One policy, or the optimum, in one setting; all but the first two fields are token means."""

    setting: Setting
    policy: str
    n_tokens: int
    hit_rate: float  # share of the picks that no read was needed for
    device_hit_rate: float  # share of the picks that were on the device
    misses: float
    bursts: float  # layers that waited for reads
    read_bytes: float
    stall_ms: float

    @property
    def tokens_per_s(self) -> float:
        """What decoding cannot beat with these stalls; infinite without any."""
        return 1000 / self.stall_ms if self.stall_ms else math.inf

    def as_json(self) -> dict[str, Any]:
        """All figures by name, for programs."""
        setting = self.setting
        return {
            "policy": self.policy,
            "arena_bytes": setting.arena_bytes,
            "n_slots": setting.n_slots,
            "n_resident": setting.n_resident,
            "n_device": setting.n_device,
            "tier_rule": setting.tier_rule,
            "n_tokens": self.n_tokens,
            "hit_rate": self.hit_rate,
            "device_hit_rate": self.device_hit_rate,
            "misses_per_token": self.misses,
            "bursts_per_token": self.bursts,
            "bytes_per_token": self.read_bytes,
            "stall_ms_per_token": self.stall_ms,
            "tokens_per_s_at_most": self.tokens_per_s if self.stall_ms else None,
        }


def plan_setting(
    shape: TraceShape, arena: str, *, device: str = "", tier_rule: str = "auto"
) -> Setting:
    """Return the caches that sizes such as "96GiB" or "30%" (of all experts) give.

    The ring of Engram rows, at most 33 MiB, is left out. Raises ConfigError, also where the arena
    is too small for the daemon.
    """
    n_resident = _share(arena, shape)
    if n_resident is None:
        size_bytes = parse_size(arena, "--arena")
        plan = plan_arena(
            size_bytes,
            top_k_batch=shape.top_k,
            n_keys=shape.n_keys,
            bytes_of=lambda n_slots: _arena_bytes(shape, n_slots),
        )
        n_slots = plan.n_slots
    else:
        n_slots = n_resident
        while n_slots - min(MOST_FREE, n_slots // 8) < n_resident:
            n_slots += 1
        size_bytes = _arena_bytes(shape, n_slots)
    budget = slot_budget(n_slots, shape.top_k)
    n_device = _share(device, shape) if device else 0
    if n_device is None:
        n_device = min(parse_size(device, "--device") // shape.slot_bytes, shape.n_keys)
    return Setting(
        arena_bytes=size_bytes,
        n_slots=n_slots,
        n_resident=n_slots - budget.free_pool,
        max_experts=max(budget.max_experts, shape.top_k),
        n_device=n_device,
        tier_rule=tier_rule,
    )


def simulate(
    trace: RoutingTrace,
    settings: Sequence[Setting],
    policies: Sequence[str],
    disk: Disk,
    *,
    warm_up: int | None = None,
) -> Iterator[Figures]:
    """Yield the figures of each setting: every policy's, then the optimum's.

    warm_up  tokens at the beginning that fill the caches and are not counted; None: a quarter

    Raises ConfigError where no token would be left.
    """
    counts = _counted_steps(trace, warm_up)
    for setting in settings:
        for name in policies:
            yield _figures(trace, counts, setting, name, _replayed(trace, setting, name), disk)
        best = optimum(trace, setting.n_resident + setting.n_device)
        yield _figures(trace, counts, setting, OPTIMUM, best, disk)


def _replayed(trace: RoutingTrace, setting: Setting, name: str) -> Replayed:
    n_keys = trace.shape.n_keys
    policy = make_policy(name, n_keys)
    if not setting.n_device:
        return replay(trace, ArenaTier(n_keys, setting.n_resident, policy, setting.max_experts))
    device = DeviceTier(n_keys, setting.n_device)
    least_share = TIER_RULES[setting.tier_rule]
    tiered = TieredPolicy(policy, device.tier, least_device_share=least_share)
    arena = ArenaTier(n_keys, setting.n_resident, tiered, setting.max_experts)
    return replay(trace, arena, device)


def _counted_steps(trace: RoutingTrace, warm_up: int | None) -> NDArray[np.int64]:
    tokens = np.flatnonzero(trace.is_token)
    n_left_out = len(tokens) // WARM_UP_SHARE if warm_up is None else warm_up
    if n_left_out >= len(tokens):
        raise ConfigError(f"the trace has {len(tokens)} tokens, {n_left_out} are for warming up")
    return tokens[n_left_out:]


def _figures(
    trace: RoutingTrace,
    counts: NDArray[np.int64],
    setting: Setting,
    name: str,
    replayed: Replayed,
    disk: Disk,
) -> Figures:
    shape = trace.shape
    misses = float(replayed.misses[counts].mean())
    bursts = float(replayed.bursts[counts].mean())
    on_device = 1 - float(replayed.arena_picks[counts].mean()) / shape.picks_per_token
    read_bytes = misses * shape.expert_bytes
    return Figures(
        setting=setting,
        policy=name,
        n_tokens=len(counts),
        hit_rate=1 - misses / shape.picks_per_token,
        device_hit_rate=on_device,
        misses=misses,
        bursts=bursts,
        read_bytes=read_bytes,
        stall_ms=bursts * disk.latency_ms + 1000 * read_bytes / disk.bytes_per_s,
    )


def _share(text: str, shape: TraceShape) -> int | None:
    """The experts that "30%" means, None for a text of another form."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text, re.ASCII)
    if match is None:
        return None
    n_experts = round(float(match[1]) / 100 * shape.n_keys)
    if not shape.top_k <= n_experts <= shape.n_keys:
        raise ConfigError(
            f"{text.strip()} of {shape.n_keys} experts is {n_experts}, "
            f"wanted {shape.top_k} to {shape.n_keys}"
        )
    return n_experts


def _arena_bytes(shape: TraceShape, n_slots: int) -> int:
    layout = ArenaLayout.plan(
        n_layers=shape.n_layers,
        n_experts=shape.n_experts,
        n_slots_max=max(n_slots, 1),
        slot_bytes=shape.slot_bytes,
        row_bytes=0,
        ring_rows=0,
        piece_offsets=(0,) * len(PIECES),
        piece_bytes=(0,) * len(PIECES),
    )
    return layout.bookkeeping_bytes + n_slots * layout.slot_bytes
