"""What the slot cache hands back to its owner: reads to start and answers to send.

Plain frozen data; the owner (the daemon's server) turns it into reads and messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from protocol.errors import ProtocolError

SlotChange = tuple[int, int, int]
"""(layer, expert, slot), slot -1 = the key left the table."""


class RequestRefused(ProtocolError):
    """A message that this engine or reader may not send now. Nothing was changed."""

    def __init__(self, reason: str, text: str) -> None:
        """Take one of `protocol.wire.messages.REFUSALS` and what was found and wanted."""
        super().__init__(text)
        self.reason = reason


class Purpose(IntEnum):
    """What a read is for, the most urgent first."""

    DEMAND = 0  # an engine waits for it in a write window
    FETCH = 1  # a reader waits for it
    AHEAD = 2  # a chunk's next layer will want it
    WARM = 3  # somebody asked to have it loaded when idle
    HINT = 4  # somebody foresees that it may be wanted


@dataclass(frozen=True, slots=True)
class Load:
    """One read to start: the bytes of a key into a slot that is LOADING already.

    Give it back, once, to `SlotCache.finish` or `SlotCache.fail` when no read call that may
    write the slot is outstanding any more.
    """

    slot: int
    layer: int
    expert: int
    generation: int  # of the slot when the read started
    purpose: Purpose

    @property
    def demand(self) -> bool:
        """Whether an engine waits for it."""
        return self.purpose is Purpose.DEMAND


@dataclass(frozen=True, slots=True)
class KeyFault:
    """Why one key of a request has no slot."""

    layer: int
    expert: int
    code: str  # EIO, CHECKSUM, TRUNCATED, QUARANTINED, NO_SLOT, CANCELLED, TIMEOUT
    text: str


@dataclass(frozen=True, slots=True)
class TableChanges:
    """The final state of every key changed after `from_version`, ascending by key."""

    from_version: int  # above the version asked for: history is too short, the engine must Resync
    to_version: int
    changes: tuple[SlotChange, ...]


@dataclass(frozen=True, slots=True)
class WindowAnswer:
    """The final answer to one MissRequest, or a part of the answer to a Stream.

    A final one closes (or had closed) the write window.
    """

    request: int
    layer: int
    experts: tuple[int, ...]
    slots: tuple[int, ...]  # parallel to experts; -1: failed, then in `errors`, or not in this part
    table: TableChanges
    errors: tuple[KeyFault, ...]
    n_hits: int  # keys that were READY when the window opened
    n_loaded: int  # keys read for this request, finished well
    n_adopted: int  # keys that were being read for somebody else already
    final: bool = True


@dataclass(frozen=True, slots=True)
class Lease:
    """A slot that keeps its bytes until it is released."""

    layer: int
    expert: int
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class FetchAnswer:
    """The answer to one Fetch. `busy`: nothing was done, the quota is in use; try again later."""

    client: int
    request: int
    leases: tuple[Lease, ...]
    errors: tuple[KeyFault, ...]
    busy: bool = False


@dataclass(slots=True)
class Outcome:
    """Everything that fell due since the last `SlotCache.drain`, in the order it did."""

    loads: list[Load] = field(default_factory=list)
    promoted: list[Load] = field(default_factory=list)  # under way; the purpose is a new one
    unwanted: list[Load] = field(default_factory=list)  # under way; to be read no further
    answers: list[WindowAnswer] = field(default_factory=list)
    fetches: list[FetchAnswer] = field(default_factory=list)
