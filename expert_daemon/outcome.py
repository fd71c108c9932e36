"""What the slot cache hands back to its owner: reads to start and answers to send.

Plain frozen data; the owner (the daemon's server) turns it into reads and messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.errors import ProtocolError

SlotChange = tuple[int, int, int]
"""(layer, expert, slot), slot -1 = the key left the table."""


class RequestRefused(ProtocolError):
    """A message that this engine or reader may not send now. Nothing was changed."""

    def __init__(self, reason: str, text: str) -> None:
        """Take one of `protocol.wire.messages.REFUSALS` and what was found and wanted."""
        super().__init__(text)
        self.reason = reason


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
    demand: bool  # an engine waits for it in a write window; else a reader does


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
    """The final answer to one MissRequest; it closes (or had closed) the write window."""

    request: int
    layer: int
    experts: tuple[int, ...]
    slots: tuple[int, ...]  # parallel to experts, -1 = failed, then in `errors`
    table: TableChanges
    errors: tuple[KeyFault, ...]
    n_hits: int  # keys that were READY when the window opened
    n_loaded: int  # keys read for this request, finished well
    n_adopted: int  # keys that were being read for somebody else already


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
    promoted: list[Load] = field(default_factory=list)  # under way; an engine waits for it now
    answers: list[WindowAnswer] = field(default_factory=list)
    fetches: list[FetchAnswer] = field(default_factory=list)
