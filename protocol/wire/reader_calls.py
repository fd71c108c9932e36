"""The reader's side of the client: leases on experts, and their bytes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from protocol.arena.layout import SlotState
from protocol.errors import DaemonBusy, HeadraceError, LeaseLost, ShardError

from . import messages as m
from .connection import Deadline
from .requests import Requests

SHARD_CODES = frozenset(("EIO", "CHECKSUM", "TRUNCATED", "QUARANTINED"))
_ANSWER_MS = 100  # for an answer's way here, beyond the caller's deadline


@dataclass(frozen=True, slots=True)
class Lease:
    """An expert that stays in its slot until it is released, or the daemon dies."""

    layer: int
    expert: int
    slot: int
    generation: int  # of the slot


@dataclass(frozen=True, slots=True)
class SlotView:
    """The six pieces of an expert as read-only bytes in the arena; a piece may be empty."""

    gate: memoryview
    up: memoryview
    down: memoryview
    gate_scale: memoryview
    up_scale: memoryview
    down_scale: memoryview


class ReaderCalls(Requests):
    """Calls of the role "reader"."""

    def fetch(self, keys: Iterable[tuple[int, int]], *, wait_ms: float = 10_000) -> list[Lease]:
        """A lease for each (layer, expert), in the order given; all or none.

        Raises ShardError where an expert cannot be read, DaemonBusy where slots or quota do not
        suffice within wait_ms, DaemonLost, and ValueError for more keys than a reader may lease.
        """
        wanted = tuple((int(layer), int(expert)) for layer, expert in keys)
        quota = self._connection.welcome.lease_quota
        if len(wanted) > quota:
            raise ValueError(f"{len(wanted)} keys, a reader may lease {quota}")
        if not wanted:
            return []
        deadline = Deadline(wait_ms)
        while True:
            number = self._next_number()
            request = m.Fetch(number, wanted, deadline.left_ms)
            answer, _ = self._settle(
                request, number, (m.Leased, m.Busy), deadline.left_ms + _ANSWER_MS
            )
            if isinstance(answer, m.Leased):
                return self._leases(wanted, answer)
            if answer.retry_ms >= deadline.left_ms:
                raise DaemonBusy(f"no room for {len(wanted)} leases within {wait_ms:g} ms")
            time.sleep(answer.retry_ms / 1000)

    def _leases(self, wanted: tuple[tuple[int, int], ...], answer: m.Leased) -> list[Lease]:
        held = {lease[:2]: Lease(*lease) for lease in answer.leases}
        if answer.errors or set(held) != set(wanted):
            self._give_back(answer.leases)
            raise _fetch_error(answer.errors)
        return [held[key] for key in wanted]

    def release(self, leases: Iterable[Lease]) -> None:
        """Give leases back. After a lost daemon there is nothing to give back, and no error."""
        pairs = tuple(dict.fromkeys((lease.slot, lease.generation) for lease in leases))
        if pairs and not self._connection.lost:
            self._connection.send(m.Release(pairs))

    def slot_view(self, slot: int) -> SlotView:
        """The bytes of a leased slot; check the lease after reading them."""
        piece = self._mapped.view.piece
        return SlotView(
            gate=piece(slot, "gate"),
            up=piece(slot, "up"),
            down=piece(slot, "down"),
            gate_scale=piece(slot, "gate_scale"),
            up_scale=piece(slot, "up_scale"),
            down_scale=piece(slot, "down_scale"),
        )

    def check(self, lease: Lease) -> None:
        """Raise LeaseLost unless all that was read from the slot until now was the lease's.

        A lease is only lost when the daemon dies and its successor needs the slot.
        """
        header = self._mapped.view.headers[lease.slot]
        state, generation = int(header["state"]), int(header["generation"])
        if generation != lease.generation or state not in (SlotState.READY, SlotState.RETIRING):
            raise LeaseLost(
                f"layer {lease.layer} expert {lease.expert}: slot {lease.slot} is of generation "
                f"{generation} in state {state}, the lease of {lease.generation}"
            )

    @contextmanager
    def leased(
        self, keys: Iterable[tuple[int, int]], *, wait_ms: float = 10_000
    ) -> Iterator[list[Lease]]:
        """Leases for a block, as fetch gives them; checked, then released at its end."""
        leases = self.fetch(keys, wait_ms=wait_ms)
        try:
            yield leases
            for lease in leases:
                self.check(lease)
        finally:
            self.release(leases)


def _fetch_error(errors: tuple[tuple[int, int, str, str], ...]) -> HeadraceError:
    text = "; ".join(
        f"layer {layer} expert {expert}: {code}: {why}" for layer, expert, code, why in errors
    )
    if any(code in SHARD_CODES for _, _, code, _ in errors):
        return ShardError(text)
    return DaemonBusy(text or "the daemon leased other keys than those asked for")
