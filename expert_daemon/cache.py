"""The slot cache: which key sits in which arena slot, and who may change that when.

It owns the slot table and the slot headers (numpy arrays given by the caller, usually views of
the arena). It is pure: no read, no clock, no thread, no socket. One thread calls it.

Use: call one event method (`open_window`, `finish`, `fail`, `fetch`, `ack` ...), then `drain`:
start the loads, send the answers. Then push `changes_since(what the engine was sent last)`
where `window_open` is false and `table_version` has grown.

Invariants (`check` verifies them):
* a slot is in exactly one state and its only edges are FREE-LOADING, READY-LOADING (in a
  write window), READY-RETIRING, LOADING-READY, LOADING-RETIRING, LOADING-FREE, RETIRING-FREE;
* LOADING stands in the header before the first byte, READY after the last byte and checksum;
  on eviction the table entry goes to -1 before anything else;
* a key is READY or LOADING (and not disowned) in at most one slot;
* no slot of the open window's experts, none of its busy ones, none leased, none LOADING is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .outcome import Load, Outcome, TableChanges
from .policy import Policy


class SlotCache:
    """The state machine of DESIGN.md section 2 over `table` and `headers`."""

    def __init__(
        self,
        table: NDArray[np.int32],
        headers: NDArray[Any],
        policy: Policy,
        *,
        free_pool: int,
        lease_quota: int,
        sequence: NDArray[np.uint64] | None = None,
        first_version: int = 1,
        history: int = 8192,
    ) -> None:
        """Start empty: every slot FREE, every table entry -1, no engine.

        table        [n_layers, n_experts] i32, written here only
        headers      [n_slots] of `protocol.arena.layout.HEADER`, written here only
        policy       over flat keys, layer * n_experts + expert
        free_pool    slots kept FREE for readers and prefetch (`Budget.free_pool`)
        lease_quota  leases of all readers together, those being loaded included
        sequence     one u64, the table's sequence lock; odd while an entry is written
        history      keys whose last change is remembered for `changes_since`
        """

    @classmethod
    def adopt(
        cls,
        table: NDArray[np.int32],
        headers: NDArray[Any],
        policy: Policy,
        *,
        free_pool: int,
        lease_quota: int,
        sequence: NDArray[np.uint64] | None = None,
        history: int = 8192,
        engine_may_live: bool = True,
    ) -> SlotCache:
        """Take over what a former daemon left: READY slots stay READY with their scores.

        Every other slot is RETIRING until an engine attached and acknowledged, or `engine_gone`.
        The table is rebuilt from the READY headers; of two with one key the newer version stays,
        then the newer generation. Versions go on above every version found.
        `engine_may_live=False` (nobody is attached to the arena) frees the others at once.
        """

    @property
    def n_slots(self) -> int: ...

    @property
    def table_version(self) -> int: ...

    @property
    def window_open(self) -> bool: ...

    # the engine

    def engine_attached(self) -> None:
        """An engine was sent Welcome (the whole table at `table_version`); nothing acked yet."""

    def engine_gone(self) -> None:
        """No engine reads the arena: the window closes unanswered, RETIRING slots are FREE.

        Reads under way go on and publish.
        """

    def resync(self) -> None:
        """The engine gets the whole table: an open window closes unanswered (the table says all).

        Acknowledges nothing; the engine's next `applied` does.
        """

    def open_window(
        self,
        request: int,
        step: int,
        layer: int,
        experts: Sequence[int],
        busy: Sequence[int],
        applied: int,
        epoch_done: int,
        epoch_launched: int = 0,
    ) -> None:
        """Serve a MissRequest: hits, loads in flight adopted, loads begun. Acknowledges too.

        Its one WindowAnswer comes out of `drain`, at once where all are hits. The same number
        again: nothing while the window is open, else the same answer with the changes since.
        Raises ProtocolError where another window is open, for a number that is older than the
        remembered ones or reused with other experts, or for an `applied` from the future.
        """

    def cancel(self, request: int) -> None:
        """Close the window now; its answer lists every change made and CANCELLED keys.

        Reads under way go on; their slots stay LOADING until `finish` or `fail`, and what
        finishes well is published. A number already answered is answered again; an unknown
        one with no slots.
        """

    def ack(self, applied: int, epoch_done: int, epoch_launched: int = 0) -> None:
        """The device's table reflects version `applied`; launches up to `epoch_done` are done.

        epoch_launched  the engine's launch counter as read after the message came. A RETIRING
                        slot is FREE once its version is applied and every launch up to the
                        counter seen then is done. 0 where the engine launches synchronously.
        Raises ProtocolError for a version that does not exist yet.
        """

    def touch(self, step: int, picks: NDArray[np.uint16]) -> int:
        """Count uses, [n, 2] of (layer, expert); each (step, layer, expert) once. Returns how many."""

    # reads

    def finish(self, load: Load, checksum: int = 0) -> bool:
        """The read returned whole: publish the key. False where the slot's generation moved on."""

    def fail(self, load: Load, code: str, text: str) -> None:
        """The read returned without the bytes: FREE where the slot came from FREE, else RETIRING."""

    def disown(self, load: Load) -> None:
        """The read's result is not wanted any more: it will not publish, the slot stays LOADING."""

    # readers

    def fetch(self, client: int, request: int, keys: Sequence[tuple[int, int]]) -> None:
        """Lease `keys` to a reader; the FetchAnswer comes out of `drain` when all are there.

        Absent keys are read into FREE slots only; without one they wait. Over the quota: busy.
        """

    def end_fetch(self, client: int, request: int, code: str = "TIMEOUT") -> None:
        """Answer a waiting fetch with what is there; the rest fails (NO_SLOT or `code`)."""

    def release(self, client: int, leases: Sequence[tuple[int, int]]) -> int:
        """Give (slot, generation) leases back; returns how many were held."""

    def client_gone(self, client: int) -> None:
        """Drop the reader's leases and waiting fetches."""

    # what falls due

    def drain(self) -> Outcome:
        """Loads to start and answers to send since the last call. Cheap when nothing happened."""

    def changes_since(self, from_version: int) -> TableChanges:
        """The final state of each key changed after `from_version`; see TableChanges for a gap."""

    def check(self) -> None:
        """Raise AssertionError where an invariant does not hold. O(n_slots); for tests."""
