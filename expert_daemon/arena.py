"""The daemon's arena: created or taken over from a predecessor, populated.

An arena that a predecessor left comes by LISTEN_FDS under the name `arena`, from systemd's
descriptor store or from a parent. Where layout and model are ours its READY slots keep their bytes;
where they are not, but the file is large enough, it is initialised again in place; else it is given
up before a new one is made.

Invariants: what is populated never exceeds the size asked for; each start raises the generation;
slots of a foreign arena count as readable by its engine until that process is gone.
"""

from __future__ import annotations

import mmap
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from protocol.arena.fds import check_sealed, create_arena
from protocol.arena.identity import Identity, read_identity, update_identity, write_identity
from protocol.arena.layout import ArenaView, SlotState
from protocol.arena.mapping import map_file
from protocol.errors import ConfigError, ProtocolError
from protocol.sizes import format_size

from .arena_plan import PlannedArena, plan
from .arena_search import arena_name, claim
from .log import log
from .populate import (
    available_bytes,
    huge_bytes,
    populate,
    punch_hole,
    tell_of_small_pages,
)
from .source import Bytes

__all__ = [
    "ARENA_NAME",
    "Arena",
    "ArenaOf",
    "PlannedArena",
    "describe",
    "open_arena",
    "plan",
    "process_start",
]

ARENA_NAME = "arena"
HUGE_WORTH_BYTES = 1 << 30  # of an arena, before anything is said about its pages
STAMP = np.dtype("<u8")  # the first word of the policy section


@dataclass(slots=True)
class Arena:
    """The mapped arena of this daemon."""

    descriptor: int
    view: ArenaView
    identity: Identity
    file_bytes: int
    memory: Bytes  # the whole mapping, u8
    is_adopted: bool  # slots of a predecessor are in it
    engine_pid: int  # of a living process that may still read it, 0 where there is none
    is_taken_over: bool = False  # the file was there before
    is_suspect: bool = False  # its engine died without a word, and nobody has looked at it since
    huge_bytes: int = 0  # in pages of 2 MiB, when it was opened

    @property
    def is_huge(self) -> bool:
        """Whether most of it is in pages of 2 MiB."""
        return 2 * self.huge_bytes > self.view.layout.populated_bytes(self.identity.n_slots)

    def slot(self, slot: int) -> Bytes:
        """One slot's bytes, writable."""
        offset = self.view.layout.slot_offset(slot)
        return self.memory[offset : offset + self.view.layout.rooms.size(slot)]

    def note_engine(self, pid: int) -> None:
        """Write into the identity page which process is the engine; 0: none.

        What another one wrote of its device cache is true no more.
        """
        started = _start_if_known(pid)
        if (pid, started) != (self.identity.engine_pid, self.identity.engine_started):
            self.view.tier[:] = 0
        self.identity = update_identity(self.memory.data, engine_pid=pid, engine_started=started)

    def note_slots(self, n_slots: int) -> None:
        """Write how many slots are in use, which outlives this daemon."""
        self.identity = update_identity(self.memory.data, n_slots=n_slots)

    def note_clean(self) -> None:
        """Write that this daemon ended in order: nothing is being written any more."""
        self.identity = update_identity(self.memory.data, clean=True)


@dataclass(frozen=True, slots=True)
class ArenaOf:
    """Whose arena it is: what tells one that may be taken over from any other."""

    fingerprint: bytes  # of the model's layout, 16
    stamp: int  # of the shards as they are: the bytes of others are not theirs
    runtime_dir: Path


def open_arena(planned: PlannedArena, whose: ArenaOf, passed: int | None) -> Arena:
    """Return a populated arena of a new generation, from the descriptor `passed` where it fits.

    Raises ConfigError where the memory cannot be had.
    """
    arena = _taken_over_or_new(planned, whose, passed)
    arena.huge_bytes = huge_bytes(arena.memory)
    if planned.n_bytes >= HUGE_WORTH_BYTES and not (arena.is_huge or arena.is_taken_over):
        tell_of_small_pages()
    return arena


def _taken_over_or_new(planned: PlannedArena, whose: ArenaOf, passed: int | None) -> Arena:
    if passed is not None:
        try:
            check_sealed(passed)
            arena = _take_over(planned, whose, passed)
        except (ProtocolError, OSError) as error:
            log(f"the arena passed on is given up: {error}")
            os.close(passed)
        else:
            arena.is_taken_over = True
            return arena
    available = available_bytes()
    if 0 < available < planned.n_bytes:
        raise ConfigError(
            f"arena: {format_size(planned.n_bytes)} asked for, {format_size(available)} of memory "
            "are available; choose a smaller --arena"
        )
    descriptor = create_arena(planned.layout.n_bytes, arena_name(whose.runtime_dir))
    claim(descriptor)
    return _initialise(planned, whose, descriptor, generation=1, engine_pid=0)


def _take_over(planned: PlannedArena, whose: ArenaOf, descriptor: int) -> Arena:
    layout = planned.layout
    with mmap.mmap(descriptor, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ) as page:
        identity: Identity | None = None
        try:
            identity = read_identity(page)
            difference = _difference(identity, planned, whose, descriptor)
        except ProtocolError as error:
            difference = str(error)
    if not claim(descriptor):  # after the page was closed: that would end the claim
        raise ProtocolError("another daemon serves it")
    file_bytes = os.fstat(descriptor).st_size
    if difference and file_bytes < layout.n_bytes:
        raise ProtocolError(f"{difference}; {file_bytes} bytes, wanted {layout.n_bytes}")
    engine_pid = _living_engine(identity)
    generation = identity.daemon_generation + 1 if identity else 1
    if difference:
        log(f"the arena passed on is initialised again: {difference}")
        return _initialise(planned, whose, descriptor, generation=generation, engine_pid=engine_pid)
    memory = _map(descriptor, planned)
    identity = update_identity(
        memory.data,
        daemon_generation=generation,
        n_slots=planned.n_slots,
        n_slots_set=planned.n_slots_set,
        clean=False,
    )
    view = ArenaView(memory.data, layout)
    is_suspect = identity.engine_pid != engine_pid  # it said no Bye: its word stands there still
    return Arena(
        descriptor, view, identity, file_bytes, memory, True, engine_pid, is_suspect=is_suspect
    )


def _difference(identity: Identity, planned: PlannedArena, whose: ArenaOf, descriptor: int) -> str:
    """Return what keeps an arena's slots from being used, empty where nothing does."""
    if identity.fingerprint != whose.fingerprint:
        return f"it holds model {identity.fingerprint.hex()}, wanted {whose.fingerprint.hex()}"
    if identity.layout != planned.layout:
        return (
            f"it has room for {identity.layout.n_slots_max} slots of "
            f"{identity.layout.slot_bytes} bytes, wanted {planned.layout.n_slots_max} of "
            f"{planned.layout.slot_bytes}"
        )
    if identity.n_slots > planned.n_slots and _living_engine(identity):  # it may read them all
        return f"it uses {identity.n_slots} slots, wanted {planned.n_slots}"
    stamp = os.pread(descriptor, STAMP.itemsize, planned.layout.offset("policy"))
    if int.from_bytes(stamp, "little") != whose.stamp:
        return "the shards were written to or replaced since"
    return ""


def _initialise(
    planned: PlannedArena, whose: ArenaOf, descriptor: int, *, generation: int, engine_pid: int
) -> Arena:
    layout = planned.layout
    memory = _map(descriptor, planned)
    memory[: layout.bookkeeping_bytes] = 0
    view = ArenaView(memory.data, layout)
    view.pieces[:] = planned.pieces
    if engine_pid:  # it may be reading any of them
        view.headers["state"] = SlotState.RETIRING
    view.policy[: STAMP.itemsize].view(STAMP)[0] = whose.stamp
    identity = Identity(
        layout=layout,
        arena_id=secrets.token_bytes(16),
        fingerprint=whose.fingerprint,
        daemon_generation=generation,
        n_slots=planned.n_slots,
        n_slots_set=planned.n_slots_set,
        engine_pid=engine_pid,
        engine_started=_start_if_known(engine_pid),
    )
    write_identity(memory.data, identity)
    file_bytes = os.fstat(descriptor).st_size
    return Arena(descriptor, view, identity, file_bytes, memory, bool(engine_pid), engine_pid)


def _map(descriptor: int, planned: PlannedArena) -> Bytes:
    layout = planned.layout
    file_bytes = os.fstat(descriptor).st_size
    memory: Bytes = np.frombuffer(map_file(descriptor, file_bytes, writable=True), np.uint8)
    slots = layout.slots_range(0, planned.n_slots)
    used = sum(slots)
    if file_bytes > used:  # a larger predecessor may have left pages there
        punch_hole(descriptor, used, file_bytes - used)
    populate(
        memory,
        descriptor,
        [
            (0, layout.bookkeeping_bytes),
            slots,
        ],
        n_threads=os.cpu_count() or 1,
    )
    return memory


def _living_engine(identity: Identity | None) -> int:
    if identity is None or identity.engine_pid == 0:
        return 0
    try:
        started = process_start(identity.engine_pid)
    except OSError as error:  # nobody knows that it has gone
        log(f"engine {identity.engine_pid} counts as alive: {error}")
        return identity.engine_pid
    is_same = identity.engine_started in (started, 0)  # 0: its start could not be read
    return identity.engine_pid if started and is_same else 0


def _start_if_known(pid: int) -> int:
    """Return when a process started, 0 where there is none or it cannot be read."""
    try:
        return process_start(pid) if pid else 0
    except OSError as error:
        log(f"when process {pid} started is not known: {error}")
        return 0


def process_start(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 where there is none.

    Raises OSError where that cannot be read, as without a descriptor left.
    Source: proc_pid_stat(5), field 22.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(text.rpartition(")")[2].split()[19])


def describe(arena: Arena) -> str:
    """Return the arena in a line for the log."""
    layout = arena.view.layout
    kept = int((arena.view.headers["state"] == SlotState.READY).sum())
    n_bytes = layout.populated_bytes(arena.identity.n_slots)
    sizes = " or ".join(map(str, layout.rooms.sizes))
    pages = " in pages of 2 MiB" if arena.is_huge else ""
    return (
        f"arena of {format_size(n_bytes)}{pages}: {arena.identity.n_slots} slots of "
        f"{sizes} bytes, {layout.ring_rows} rows, "
        f"{kept} experts kept, generation {arena.identity.daemon_generation}"
    )
