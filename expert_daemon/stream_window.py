"""The write window of a Stream: a chunk's experts of one layer, in parts, consumed in order.

Experts before `n_answered` have been named to the engine; those before `n_consumed` are no longer
read by it. At most `limit` are read and not consumed, those read ahead for the next layer included,
but for one that the engine waits for while all of them are later ones.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from .outcome import KeyFault, TableChanges, WindowAnswer
from .windows import Window

PARTS = 4  # a part is sent for as many experts as a window has quarters, or where the engine waits


@dataclass(slots=True)
class StreamWindow(Window):
    """A Stream and how far it is."""

    step: int = 0
    limit: int = 1
    ahead: list[int] = field(default_factory=list)  # keys of the next layer, not begun
    begun_ahead: set[int] = field(default_factory=set)
    n_answered: int = 0
    n_consumed: int = 0
    sent_version: int = 0  # to_version of the last part
    unconsumed: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)  # read for this stream and not consumed

    def __post_init__(self) -> None:
        self.key_set = frozenset(self.keys)
        self.unconsumed = set(self.keys)
        self.sent_version = self.applied

    @property
    def kept(self) -> AbstractSet[int]:
        """Keys whose slots may not be taken: those not consumed, and what was read ahead."""
        return self.unconsumed | self.begun_ahead

    @property
    def room(self) -> int:
        """How many more reads may be begun."""
        return max(0, self.limit - len(self.held) - len(self.begun_ahead))

    @property
    def lacks_next(self) -> bool:
        """Whether all that was named is consumed and the next expert has no slot.

        What was read for later experts helps nothing then: they are consumed in their turn.
        """
        if self.n_consumed < self.n_answered or not self.unplaced:
            return False
        return self.unplaced[0] == self.keys[self.n_answered]

    def displace(self, key: int) -> None:
        """`key` was there and was not named: it leaves, and needs a slot in its turn."""
        self.held.discard(key)
        insort(self.unplaced, key)

    def begin(self, key: int) -> None:
        """`key` is being read for this stream."""
        self.reading.add(key)
        self.started.add(key)
        self.held.add(key)

    def adopt(self, key: int) -> None:
        """`key` is being read for somebody else."""
        self.reading.add(key)
        self.held.add(key)
        self.n_adopted += 1

    def landed(self, key: int, fault: tuple[str, str] | None) -> None:
        """The read of `key` returned; `fault` is (code, text) where without its bytes."""
        if key in self.reading:
            self.reading.remove(key)
            if fault is not None:
                self.faults[key] = fault
                self.held.discard(key)

    def consume(self, up_to: int) -> None:
        """The engine reads no slot of the experts up to this one any more."""
        n = min(bisect_right(self.experts, up_to), self.n_answered)
        for key in self.keys[self.n_consumed : n]:
            self.unconsumed.discard(key)
            self.held.discard(key)
        self.n_consumed = max(self.n_consumed, n)
        self._pass_over_failed()

    def _pass_over_failed(self) -> None:
        """What was named as failed has no slot: it need not be consumed."""
        while self.n_consumed < self.n_answered and self.keys[self.n_consumed] in self.faults:
            self.unconsumed.discard(self.keys[self.n_consumed])
            self.n_consumed += 1

    def n_due(self, slot_of: dict[int, int]) -> int:
        """Up to where an answer is due now: `n_answered` where none is."""
        n = self.n_answered
        while n < len(self.keys) and (self.keys[n] in slot_of or self.keys[n] in self.faults):
            n += 1
        n_new = n - self.n_answered
        is_awaited = self.n_answered == self.n_consumed or n == len(self.keys)
        return n if is_awaited or n_new >= max(1, self.limit // PARTS) else self.n_answered

    def part(self, slot_of: dict[int, int], table: TableChanges, n: int) -> WindowAnswer:
        """The answer for the experts up to the `n`th that were not answered before."""
        slots = [-1] * len(self.keys)
        errors: list[KeyFault] = []
        for place in range(self.n_answered, n):
            key, expert = self.keys[place], self.experts[place]
            if key in self.faults:
                errors.append(KeyFault(self.layer, expert, *self.faults[key]))
            else:
                slots[place] = slot_of[key]
        self.n_answered = n
        self._pass_over_failed()
        self.sent_version = table.to_version
        return WindowAnswer(
            request=self.request,
            layer=self.layer,
            experts=self.experts,
            slots=tuple(slots),
            table=table,
            errors=tuple(errors),
            n_hits=self.n_hits,
            n_loaded=len(self.started - self.faults.keys()),
            n_adopted=self.n_adopted,
            final=n == len(self.keys),
        )

    def answer(self, slot_of: dict[int, int], table: TableChanges) -> WindowAnswer:
        """The final answer to a stream that was closed early; what was answered is not repeated."""
        for key in self.keys[self.n_answered :]:
            if key not in slot_of:
                self.faults.setdefault(key, ("NO_SLOT", "it has left since"))
        return self.part(slot_of, table, len(self.keys))
