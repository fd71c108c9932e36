"""What a request and its expert source share: what it cost, how to wait, when to stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from protocol.wire.client import ExpertClient


class RequestCancelled(Exception):
    """The running request was cancelled; its sequence is not to be used further."""


@dataclass(slots=True)
class IoCounters:
    """What a request cost: picks found and not found in memory, bytes read, time waited.

    stall_ms      waiting for the expert daemon
    copy_ms       copying experts to the device; 0 where they are used in place
    hits_device   those of `hits` that lay in the device's own memory
    """

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    stall_ms: float = 0.0
    copy_ms: float = 0.0
    hits_device: int = 0

    def since(self, earlier: IoCounters) -> IoCounters:
        """Return what came after `earlier`."""
        return IoCounters(
            self.hits - earlier.hits,
            self.misses - earlier.misses,
            self.bytes_read - earlier.bytes_read,
            self.stall_ms - earlier.stall_ms,
            self.copy_ms - earlier.copy_ms,
            self.hits_device - earlier.hits_device,
        )

    def copy(self) -> IoCounters:
        """Return the counters as they stand now."""
        return replace(self)


@dataclass(slots=True)
class Waiting:
    """How to wait: what ends a request, how long a lost daemon may take, who restarts it."""

    cancelled: Callable[[], bool] = lambda: False
    daemon_wait_s: float = 60.0
    tend: Callable[[], None] = lambda: None  # called while the daemon is lost
    attached: Callable[[ExpertClient], None] = lambda _client: None  # called once it answers
