"""Which metrics the daemon shows, and from which of its statistics. docs/metrics.md describes them.

Pure: it knows no library. Names follow Prometheus: base units, `_total` for what only grows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .copies import COPY_NAMES
from .read_times import BOUNDS_MS, stat_name

Values = Mapping[str, Any]
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Metric:
    """One family: `stats` are its samples, (labels, name in Stats); `scale` multiplies them."""

    name: str  # without the `_total` of a counter
    kind: str  # "counter" or "gauge"
    help: str
    stats: tuple[tuple[Labels, str], ...]
    scale: float = 1.0

    @property
    def shown_name(self) -> str:
        """The name as it is scraped."""
        return self.name + "_total" if self.kind == "counter" else self.name


def _one(name: str, kind: str, text: str, stat: str, scale: float = 1.0) -> Metric:
    return Metric(name, kind, text, (((), stat),), scale)


def _by(name: str, kind: str, text: str, label: str, stats: Mapping[str, str]) -> Metric:
    samples = tuple((((label, value),), stat) for value, stat in stats.items())
    return Metric(name, kind, text, samples)


METRICS = (
    _one("headrace_picks", "counter", "Experts picked by committed tokens.", "n_uses"),
    _by(
        "headrace_hits",
        "counter",
        "Picks found in a tier of memory.",
        "tier",
        {"arena": "hits_arena"},
    ),
    _one("headrace_misses", "counter", "Picks that were read for a request.", "n_misses"),
    _one("headrace_miss_requests", "counter", "Requests for absent experts.", "n_requests"),
    _by(
        "headrace_fetched_keys",
        "counter",
        "Experts leased to readers, found in the arena or read.",
        "found",
        {"arena": "n_fetch_hits", "read": "n_fetch_misses"},
    ),
    _one("headrace_reads", "counter", "Experts read whole.", "reads"),
    _one("headrace_read_bytes", "counter", "Bytes of the experts that were read.", "bytes_read"),
    _one("headrace_read_errors", "counter", "Reads of experts that failed.", "read_errors"),
    _by(
        "headrace_read_retries",
        "counter",
        "Reads begun again after an error, or after a checksum that was wrong.",
        "reason",
        {"error": "read_retries", "checksum": "checksum_retries"},
    ),
    _by(
        "headrace_copy_reads",
        "counter",
        "Experts read whole, by the copy that served them in the end.",
        "copy",
        {name: f"reads_{name}" for name in COPY_NAMES},
    ),
    _by(
        "headrace_copy_read_rate_bytes",
        "gauge",
        "Bytes a second of a copy's recent reads, by which experts are dealt out to the copies.",
        "copy",
        {name: f"rate_{name}" for name in COPY_NAMES},
    ),
    _one(
        "headrace_mirror_fallbacks",
        "counter",
        "Reads begun again from the other copy, after one that failed.",
        "mirror_fallbacks",
    ),
    _one("headrace_slow_reads", "counter", "Reads that took the drive over 2 s.", "slow_reads"),
    _one("headrace_hedged_reads", "counter", "Second reads, begun for slow ones.", "n_hedges"),
    _one("headrace_lost_reads", "counter", "Reads given up before their return.", "lost_reads"),
    _by(
        "headrace_read_queue_depth",
        "gauge",
        "Parts of reads that no thread has begun.",
        "lane",
        {lane: f"queue_{lane}" for lane in ("demand", "fetch", "idle", "prefetch")},
    ),
    _one("headrace_loading_slots", "gauge", "Slots that are being read into.", "n_loading"),
    _by(
        "headrace_evictions",
        "counter",
        "Experts that left the arena, for another one or ahead of need.",
        "reason",
        {"replaced": "n_evictions", "retired": "n_retirements"},
    ),
    _one("headrace_quarantined_experts", "gauge", "Experts not to be read.", "quarantined"),
    _one("headrace_bad_copies", "gauge", "Copies in quarantine.", "quarantined_copies"),
    _one("headrace_hash_mismatches", "counter", "Slots found damaged.", "hash_mismatches"),
    _by(
        "headrace_prefetched_experts",
        "counter",
        "Experts read ahead that a token then picked, and those that went unused.",
        "outcome",
        {"useful": "n_hints_useful", "wasted": "n_hints_wasted"},
    ),
    _one("headrace_engram_rows", "counter", "Engram rows served.", "rows"),
    _one("headrace_engram_row_errors", "counter", "Engram rows that failed.", "row_errors"),
    _one("headrace_slots", "gauge", "Slots of the arena.", "n_slots"),
    _one("headrace_arena_bytes", "gauge", "Memory of the arena, as populated.", "arena_bytes"),
    _one("headrace_clients", "gauge", "Connected clients, this exporter included.", "n_clients"),
    _one("headrace_stuck_clients", "gauge", "Clients that answer no Ping.", "stuck_clients"),
    _one("headrace_dropped_clients", "counter", "Clients that took nothing.", "clients_dropped"),
    _one("headrace_refused_messages", "counter", "Messages refused.", "frames_refused"),
    _one("headrace_uptime_seconds", "gauge", "Seconds since the daemon started.", "uptime_s"),
    _one("headrace_generation", "gauge", "Daemons that served this arena.", "generation"),
)

# Those that are not one number of Stats each.
UP = ("headrace_up", "gauge", "Whether the daemon answers.")
INFO = ("headrace_daemon", "info", "The daemon's settings.")
INFO_LABELS = ("model", "policy", "read_mode")
READ_SECONDS = ("headrace_read_seconds", "histogram", "From an expert's request to its last byte.")
RESIDENT = ("headrace_resident_experts", "gauge", "Experts in the arena, by layer.")

ALL_NAMES = tuple(
    sorted(
        [
            *(metric.shown_name for metric in METRICS),
            UP[0],
            INFO[0] + "_info",
            READ_SECONDS[0],
            RESIDENT[0],
        ]
    )
)


def samples(metric: Metric, values: Values) -> list[tuple[Labels, float]]:
    """Return (labels, value) of each sample that the statistics know."""
    found = []
    for labels, stat in metric.stats:
        value = hits_in_arena(values) if stat == "hits_arena" else values.get(stat)
        if isinstance(value, int | float):
            found.append((labels, value * metric.scale))
    return found


def hits_in_arena(values: Values) -> int:
    """Picks that needed no read: most of them never reach the daemon but as uses."""
    brought = sum(int(values.get(name, 0)) for name in ("n_misses", "n_adopted"))
    return max(0, int(values.get("n_uses", 0)) - brought)


def read_buckets(values: Values) -> list[tuple[str, float]]:
    """Return (upper bound in seconds, reads) of the histogram, cumulative, +Inf last."""
    buckets = [(f"{bound / 1000:g}", float(values.get(stat_name(bound), 0))) for bound in BOUNDS_MS]
    return [*buckets, ("+Inf", float(values.get("reads", 0)))]
