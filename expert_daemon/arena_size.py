"""How large the arena is now, how large it may be, and the steps from one size to another."""

from __future__ import annotations

import os

from protocol.errors import ConfigError
from protocol.sizes import format_size

from .arena import Arena
from .budget import ArenaPlan, Budget, before_slots, plan_arena, slot_budget
from .populate import available_bytes, populate, punch_hole

RELEASE_S = 5.0  # how long memory that a drive writes beside is tried to be given back


class ArenaSize:
    """The slots in use and their budget. Memory is touched by `populate` and `release` alone."""

    def __init__(self, arena: Arena, *, top_k_batch: int, max_bytes: int, max_from: str) -> None:
        """Take the arena as it was opened, and where its maximum comes from."""
        self._arena = arena
        self._top_k_batch = top_k_batch
        self.max_bytes = max_bytes
        self._max_from = max_from
        self.budget = self.budget_of(self.n_slots)

    @property
    def n_slots(self) -> int:
        """Slots that the identity page says are in use."""
        return self._arena.identity.n_slots

    @property
    def n_bytes(self) -> int:
        """The arena as populated."""
        return self.bytes_of(self.n_slots)

    def budget_of(self, n_slots: int) -> Budget:
        """What so many slots are for."""
        return slot_budget(n_slots, self._top_k_batch, self._arena.view.layout.rooms)

    def set_budget(self, n_slots: int) -> None:
        """From now on only so many slots count."""
        self.budget = self.budget_of(n_slots)

    @property
    def max_experts(self) -> int:
        """The most experts of one MissRequest that any engine was told of."""
        return max(self.budget.max_experts, self.budget_of(self.n_slots).max_experts)

    def bytes_of(self, n_slots: int) -> int:
        """Bytes of the arena with so many slots."""
        return self._arena.view.layout.populated_bytes(n_slots)

    def plan(self, n_bytes: int) -> ArenaPlan:
        """Return the slots that a size holds.

        Raises ConfigError beyond the maximum, with its figure and where that comes from; below the
        minimum, with each addend of it; and where the machine has not as much memory.
        """
        if n_bytes > self.max_bytes:
            raise ConfigError(
                f"{_shown(n_bytes)} asked for, the arena may have {_shown(self.max_bytes)} at "
                f"most: {self._max_from}"
            )
        layout = self._arena.view.layout
        planned = plan_arena(
            n_bytes,
            top_k_batch=self._top_k_batch,
            n_keys=layout.n_keys,
            bytes_of=self.bytes_of,
            beside=lambda _: before_slots(layout, "Engram rows, laid out at the start"),
        )
        n_slots = min(planned.n_slots, layout.n_slots_max)
        wanted, available = self.bytes_of(n_slots) - self.n_bytes, available_bytes()
        if 0 < available < wanted:
            raise ConfigError(
                f"{_shown(n_bytes)} asked for, {format_size(wanted)} more than now; "
                f"{format_size(available)} of memory are available"
            )
        return ArenaPlan(n_slots, self.bytes_of(n_slots), self.budget_of(n_slots))

    def chunks(self, first: int, end: int) -> tuple[int, ...]:
        """Numbers of the chunks that hold any of the slots from `first` on, before `end`."""
        per_chunk = self._arena.view.layout.chunk_slots
        return tuple(range(first // per_chunk, -(-end // per_chunk)))

    def descriptor(self) -> int:
        """Return a descriptor of the arena's that is the caller's, for `populate` and `release`."""
        return os.dup(self._arena.descriptor)

    def populate(self, descriptor: int, n_slots: int) -> None:
        """Give the slots beyond those in use their memory; on any thread.

        Raises ConfigError where it cannot be had, and leaves none of it then.
        """
        ranges = [self._range(self.n_slots, n_slots)]
        try:
            populate(self._arena.memory, descriptor, ranges, n_threads=os.cpu_count() or 1)
        except ConfigError:
            punch_hole(descriptor, *ranges[0])
            raise

    def use(self, n_slots: int) -> None:
        """Write into the identity page how many slots are in use."""
        self._arena.note_slots(n_slots)

    def release(self, descriptor: int, n_slots: int) -> bool:
        """Give back the memory of all slots from `n_slots` on; on any thread.

        False where some of a page stays, since a drive writes into the rest of it without a pause.
        Raises OSError.
        """
        end = self._arena.view.layout.n_slots_max  # what a shrink before this one left, as well
        return punch_hole(descriptor, *self._range(n_slots, end), tries_s=RELEASE_S)

    def _range(self, first: int, end: int) -> tuple[int, int]:
        return self._arena.view.layout.slots_range(first, end)


def _shown(n_bytes: int) -> str:
    return f"{format_size(n_bytes)} ({n_bytes} bytes)"
