"""What a running daemon holds and how well that serves: facts for `headrace cache`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from protocol.arena.layout import SlotState

if TYPE_CHECKING:
    from protocol.wire.client import ExpertClient

QUARANTINE = "quarantine layer "


def cache_facts(client: ExpertClient, n_hottest: int) -> dict[str, Any]:
    """Return tiers, hit rates, troubles and each layer's hottest experts, ready for JSON.

    Scores are read from the slot headers while the daemon goes on: one may be a moment old.
    """
    stats = client.stats()
    view = client.arena
    headers = view.headers[: int(stats["n_slots"])].copy()
    return {
        "daemon": {
            name: stats[name]
            for name in ("pid", "generation", "uptime_s", "model", "policy", "read_mode")
        },
        "tiers": _tiers(stats, headers, view.tier),
        "since_start": hits(stats, ""),
        "arena_life": hits(stats, "lifetime_") | {"daemons": stats["lifetime_daemons"]},
        "troubles": troubles(stats),
        "layers": _layers(headers, view.layout.n_layers, n_hottest),
    }


def _tiers(
    stats: dict[str, Any], headers: NDArray[Any], tier: NDArray[np.uint8]
) -> dict[str, dict[str, int]]:
    n_experts = int(tier.size)
    return {
        "arena": {
            "resident": int((headers["state"] == SlotState.READY).sum()),
            "slots": int(stats["n_slots"]),
            "bytes": int(stats["arena_bytes"]),
            "of_experts": n_experts,
        },
        "device": {"resident": int(np.count_nonzero(tier)), "of_experts": n_experts},
    }


def hits(stats: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return picks, how many needed no read, and what reading cost; `prefix` picks the counters."""

    def count(name: str) -> int:
        return int(stats.get(prefix + name, 0))

    picks = count("n_uses")
    missed = min(picks, count("n_misses") + count("n_adopted"))
    reads = count("reads")
    return {
        "picks": picks,
        "hits": picks - missed,
        "misses": missed,
        "hit_rate": (picks - missed) / picks if picks else None,
        "evictions": count("n_evictions") + count("n_retirements"),
        "reads": reads,
        "bytes_read": count("bytes_read"),
        "read_ms": count("read_ns") / reads / 1e6 if reads else None,
    }


def troubles(stats: dict[str, Any]) -> list[str]:
    """Return a line for each thing that is not as it should be."""
    quarantined = [str(text) for name, text in stats.items() if name.startswith(QUARANTINE)]
    lines = [f"quarantined: {text}" for text in quarantined]
    n_quarantined = stats.get("quarantined_copies", stats["quarantined"])
    if n_quarantined > len(quarantined):
        lines.append(f"and {n_quarantined - len(quarantined)} more in quarantine")
    if stats["stuck_clients"]:
        lines.append(f"stuck: {stats['stuck']}")
    for name, text in (
        ("reads_not_back", "reads that have not returned"),
        ("read_errors", "reads that failed"),
        ("slow_reads", "reads that took over 2 s"),
        ("hash_mismatches", "slots that were damaged in memory"),
    ):
        if stats[name]:
            lines.append(f"{text}: {stats[name]}")
    return lines


def quarantined_keys(stats: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the (layer, expert) of each entry of the quarantine that Stats lists."""
    keys = []
    for name in stats:
        if name.startswith(QUARANTINE):
            layer, _, expert = name.removeprefix(QUARANTINE).partition(" expert ")
            keys.append((int(layer), int(expert.split()[0])))  # a mirror's copy says so behind
    return sorted(set(keys))


def _layers(headers: NDArray[Any], n_layers: int, n_hottest: int) -> list[dict[str, Any]]:
    ready = headers[headers["state"] == SlotState.READY]
    ready = ready[np.lexsort((ready["expert"], -ready["last_use"].astype("i8"), -ready["score"]))]
    layers = []
    for layer in range(n_layers):
        mine = ready[ready["layer"] == layer]
        hottest = [
            {"expert": int(one["expert"]), "score": round(float(one["score"]), 3)}
            for one in mine[:n_hottest]
        ]
        layers.append({"layer": layer, "resident": len(mine), "hottest": hottest})
    return layers
