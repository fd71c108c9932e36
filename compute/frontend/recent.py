"""The last requests and where their time went: for `/v1/headrace/why`, the page, and the log.

The parts of a request's time: `prompt` is made in the frontend, `queue` waits for other requests,
`disk` waits for the expert daemon, `copies` move experts to the device, `compute` is what is left
of prefill and decode, `other` what is left of the whole: the way to the client, mostly.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from protocol.sizes import format_size

from .answer import Usage

MAX_REMEMBERED = 256
PARTS = ("compute", "copies", "disk", "queue", "prompt", "other")
RUNNING = "running"
_ADVICE = {
    "compute": "the model's own work; a prompt in larger pieces (--chunk) or a faster device helps",
    "copies": "experts on their way to the device; more of them kept there help",
    "disk": "experts that were not in memory; more --arena or a faster drive helps",
    "queue": "other requests, one of which runs at a time",
    "prompt": "reading the request and making its prompt",
    "other": "the client and the way to it",
}


@dataclass(slots=True)
class Remembered:
    """A request that compute took."""

    id: str
    path: str
    usage: Usage
    began: float = field(default_factory=time.time)
    end: str = RUNNING  # then "stop", "length", "tool_calls", "left", "error"
    _started: float = field(default_factory=time.monotonic)
    _ended: float | None = None

    def ended(self, end: str) -> None:
        """Note how it ended, now."""
        self.end = end
        self._ended = time.monotonic()

    @property
    def seconds(self) -> float:
        """From the request's arrival until it ended, or until now."""
        until = time.monotonic() if self._ended is None else self._ended
        return until - self._started + self.usage.prompt_ms / 1000

    def milliseconds(self) -> dict[str, float]:
        """Return PARTS with the time of each."""
        usage, whole = self.usage, 1000 * self.seconds
        queue = usage.queue_ms
        if self.end == RUNNING and not (usage.prefill_ms or queue):
            queue = max(0.0, whole - usage.prompt_ms)
        disk, copies = usage.io["stall_ms"], usage.io["copy_ms"]
        worked = usage.prefill_ms + usage.decode_ms
        parts = {
            "compute": max(0.0, worked - disk - copies),
            "copies": copies,
            "disk": disk,
            "queue": queue,
            "prompt": usage.prompt_ms,
        }
        return parts | {"other": max(0.0, whole - sum(parts.values()))}

    def shown(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        usage, parts = self.usage, self.milliseconds()
        return {
            "id": self.id,
            "path": self.path,
            "began": round(self.began, 3),
            "end": self.end,
            "seconds": round(self.seconds, 3),
            "ms": {part: round(spent, 1) for part, spent in parts.items()},
            "most": most_of(parts),
            "prompt_tokens": usage.n_prompt,
            "cached_tokens": usage.n_cached,
            "new_tokens": usage.n_new,
            "hits_by_tier": dict(usage.tiers),
            "misses": int(usage.io["misses"]),
            "bytes_read": int(usage.io["bytes_read"]),
            "prefill_tokens_per_second": round(usage.prefill_per_second, 3),
            "decode_tokens_per_second": round(usage.decode_per_second, 3),
        }

    def line(self) -> str:
        """Return it in one line, for the log."""
        usage = self.usage
        hits = ", ".join(f"{hits} hits in the {tier}" for tier, hits in usage.tiers.items())
        return (
            f"{self.id} {self.end}: {usage.n_new} tokens after {usage.n_prompt} "
            f"({usage.n_cached} cached) in {self.seconds:.3f} s, {shares(self.milliseconds())}; "
            f"{hits or '0 hits'}, {int(usage.io['misses'])} misses, "
            f"{format_size(int(usage.io['bytes_read']))} read"
        )


class Recent:
    """The requests that are remembered, the newest last."""

    def __init__(self) -> None:
        self._all: deque[Remembered] = deque(maxlen=MAX_REMEMBERED)

    def add(self, remembered: Remembered) -> None:
        """Remember a request; the oldest is forgotten for it."""
        self._all.append(remembered)

    def last(self, count: int) -> list[Remembered]:
        """Return the last ones, the newest first."""
        return list(reversed(self._all))[:count]


def together(requests: Iterable[Remembered]) -> dict[str, Any]:
    """Return where the time of several requests went, and what that means."""
    parts = dict.fromkeys(PARTS, 0.0)
    count = 0
    for remembered in requests:
        for part, spent in remembered.milliseconds().items():
            parts[part] += spent
        count += 1
    most = most_of(parts)
    why = "no request yet" if most is None else f"{shares(parts)}; {most}: {_ADVICE[most]}"
    shown = {part: round(spent, 1) for part, spent in parts.items()}
    return {"requests": count, "ms": shown, "most": most, "why": why}


def most_of(parts: Mapping[str, float]) -> str | None:
    """Return the part that took most; None where nothing took any time."""
    most = max(parts, key=lambda part: parts[part])
    return most if parts[most] > 0 else None


def shares(parts: Mapping[str, float]) -> str:
    """Return the parts in per cent, the largest first, those under 1 % left out."""
    whole = sum(parts.values()) or 1.0
    ranked = sorted(parts.items(), key=lambda pair: -pair[1])
    told = [f"{part} {100 * spent / whole:.0f} %" for part, spent in ranked if spent >= whole / 100]
    return ", ".join(told) or "no time"
