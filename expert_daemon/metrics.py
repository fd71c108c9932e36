"""What the daemon counts. Plain integers, written on the loop's thread alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """Counts since the daemon started; bytes and nanoseconds carry their unit."""

    miss_requests: int = 0  # repeats counted
    fetches: int = 0
    reads: int = 0  # experts read whole
    reads_home: int = 0  # of these, served by the first copy
    reads_mirror: int = 0  # and by the mirror
    bytes_read: int = 0  # of these, without what alignment adds
    read_ns: int = 0  # sum over experts, from submission to the last byte's checksum
    read_errors: int = 0  # experts that failed
    slow_reads: int = 0  # whose drive took longer than 2 s
    lost_reads: int = 0  # given up without their return
    rehashed: int = 0  # slots hashed again after an engine's death
    hash_mismatches: int = 0  # of these, those that were damaged
    row_requests: int = 0
    rows: int = 0
    row_errors: int = 0
    touches: int = 0  # (step, layer, expert) counted
    hellos: int = 0
    clients_dropped: int = 0  # could not be sent to
    frames_refused: int = 0  # malformed, out of order, stale or too large

    def values(self) -> dict[str, int | float | str]:
        """All counts by name."""
        return dict(asdict(self))
