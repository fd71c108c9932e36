"""What the slot cache counts, from the daemon's start on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CacheCounters:
    """n_requested = n_hits + n_adopted + n_misses + n_barred + n_no_slot + those that wait.

    n_loads = n_published + n_failed + n_discarded + reads under way.
    """

    n_requests: int = 0  # MissRequests, repeats not counted
    n_requested: int = 0  # keys in them
    n_hits: int = 0  # READY when the request came
    n_adopted: int = 0  # under way for somebody else
    n_misses: int = 0  # read for the request
    n_barred: int = 0  # not to be read
    n_no_slot: int = 0  # nothing could be evicted, or not before the request was cancelled
    n_cancelled: int = 0  # requests cancelled
    n_uses: int = 0  # (step, layer, expert) counted
    n_fetch_hits: int = 0  # keys of readers that were READY
    n_fetch_misses: int = 0  # keys of readers that were not
    n_fetch_busy: int = 0  # Fetches sent away, the quota being in use
    n_loads: int = 0  # reads begun
    n_hedges: int = 0  # of these, second reads of a slow one's key
    n_published: int = 0  # READY since
    n_failed: int = 0
    n_discarded: int = 0  # returned after they were disowned
    n_evictions: int = 0  # READY slots taken inside a window
    n_retirements: int = 0  # READY slots given up outside of one
    n_restored: int = 0  # READY slots that a former daemon left
    n_streams: int = 0  # Streams, which are among n_requests
    n_ahead: int = 0  # reads begun for a chunk's next layer
    n_hints: int = 0  # reads begun on a hint
    n_hints_useful: int = 0  # of these, asked for by somebody then
    n_hints_wasted: int = 0  # of these, evicted before anybody asked
    n_hints_stale: int = 0  # of these, given up while under way
    n_warm: int = 0  # reads begun because somebody asked to have them loaded when idle
    n_warm_passed: int = 0  # keys not loaded: there already, or worth less than all there
