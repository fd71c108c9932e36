"""The engine's side of tests/support/cache_world.py: a device that knows what messages told it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Key = tuple[int, int]


@dataclass
class Launch:
    """Work on the device that reads these slots until it is done."""

    epoch: int
    reads: dict[Key, int]
    done: bool = False


@dataclass
class Device:
    """The engine: it knows only what messages told it."""

    table: dict[Key, int] = field(default_factory=dict)
    applied: int = 0
    state: str = "lost"  # run, window, stream, lost (nothing is launched before a Welcome)
    request: int = 0
    resync: int = 0  # number of the last one; its Welcome alone counts
    named: dict[Key, int] = field(default_factory=dict)  # of a stream, not consumed
    registered: set[int] = field(default_factory=set)  # slots that it can read
    experts: tuple[Key, ...] = ()
    busy: frozenset[int] = frozenset()
    launches: list[Launch] = field(default_factory=list)
    launched: int = 0  # the word in the engine's page
    last_request: dict[str, Any] | None = None

    @property
    def epoch_done(self) -> int:
        running = [launch.epoch for launch in self.launches if not launch.done]
        return min(running) - 1 if running else self.launched

    @property
    def read_slots(self) -> set[int]:
        return {s for launch in self.launches if not launch.done for s in launch.reads.values()}

    def nameable(self) -> set[int]:
        """Slots whose bytes may not change now."""
        slots = self.read_slots
        if self.state == "run":
            slots |= set(self.table.values())
        elif self.state == "window":
            slots |= {self.table[key] for key in self.experts if key in self.table}
        elif self.state == "stream":
            slots |= set(self.named.values())
        return slots

    def readable(self) -> dict[Key, int]:
        """What may be launched now."""
        return {"run": self.table, "stream": self.named}.get(self.state, {})

    def consumable(self) -> list[Key]:
        """Keys of a stream that no launch reads, as far as they come before all others."""
        free: list[Key] = []
        for key in sorted(self.named):
            if self.named[key] in self.read_slots:
                break
            free.append(key)
        return free
