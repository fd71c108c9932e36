"""How many slots an arena needs at least, and how many a given size holds.

The arena alone must hold what one batch of a layer may pick, twice (the layer that runs and the
one that is being loaded), the free pool, two slots for hedged reads, the readers' leases and the
prefill window. Source: DESIGN.md section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from protocol.arena.layout import ArenaLayout
from protocol.arena.rooms import Rooms
from protocol.errors import ConfigError

HEDGE_SLOTS = 2
PREFILL_WINDOW = 16
MOST_FREE = 64
MOST_LEASES = 64  # of one reader; all together may have twice as many where there is room
Addends = Sequence[tuple[str, int]]  # (name, bytes)

MANY_SLOTS = 1 << 20  # so many that no share of them is below its limit


@dataclass(frozen=True, slots=True)
class Budget:
    """What `n_slots` slots are for; all fields count slots."""

    n_slots: int
    demand: int  # 2 x top-k x batch
    free_pool: int
    hedge: int
    lease_quota: int
    prefill_window: int
    n_for_any: int  # slots that any expert may take; a layer of small ones has more

    @property
    def needed(self) -> int:
        """The sum of the addends."""
        return self.demand + self.free_pool + self.hedge + self.lease_quota + self.prefill_window

    @property
    def max_experts(self) -> int:
        """The most experts of one MissRequest: what neither pool, readers nor hedges may hold."""
        return self.n_for_any - self.free_pool - self.lease_quota - self.hedge

    def lines(self) -> list[str]:
        """Each addend with its name, one a line, the sum last."""
        addends = (
            ("2 x top-k x batch", self.demand),
            ("free pool", self.free_pool),
            ("hedged reads", self.hedge),
            ("readers' leases", self.lease_quota),
            ("prefill window", self.prefill_window),
            ("slots needed", self.needed),
        )
        return [f"  {name:<18}{count:>6}" for name, count in addends]


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """What fits into a size."""

    n_slots: int
    n_bytes: int  # of the arena with that many slots
    budget: Budget


def slot_budget(n_slots: int, top_k_batch: int, rooms: Rooms | None = None) -> Budget:
    """The budget of an arena of `n_slots`; it is legal where `needed` is at most `n_slots`.

    rooms  of the arena's slots; None: all are alike

    The lease quota is a quarter of the slots at most, and less where only the rest fits. A quarter
    of what is left over goes to it until it is twice MOST_LEASES; the others are for requests.
    """
    budget = _full_budget(n_slots, top_k_batch)
    n_for_any = n_slots if rooms is None else rooms.n_for_any(n_slots)
    quota, excess = budget.lease_quota, budget.needed - n_slots
    if excess <= 0:
        quota += min(MOST_LEASES, n_slots // 4 - quota, max(0, n_for_any - budget.needed) // 4)
    elif n_slots > minimum_slots(top_k_batch).n_slots:
        quota -= excess
    return replace(budget, lease_quota=quota, n_for_any=n_for_any)


def common_slots(top_k_batch: int) -> int:
    """How many slots must take any expert: the largest need that there may be of slots at once."""
    return _full_budget(MANY_SLOTS, top_k_batch).needed


def minimum_slots(top_k_batch: int) -> Budget:
    """The budget of the smallest legal arena for an engine with this top-k x batch."""
    n_slots = 2 * top_k_batch + HEDGE_SLOTS + PREFILL_WINDOW
    while _full_budget(n_slots, top_k_batch).needed > n_slots:
        n_slots += 1
    return _full_budget(n_slots, top_k_batch)


def before_slots(layout: ArenaLayout, rows: str = "Engram rows") -> Addends:
    """What stands in an arena before its slots: bytes by name, `rows` that of the row ring."""
    ring = layout.size("ring")
    return ((rows, ring), ("tables and headers", layout.bookkeeping_bytes - ring))


def plan_arena(
    size_bytes: int,
    *,
    top_k_batch: int,
    n_keys: int,
    bytes_of: Callable[[int], int],
    beside: Callable[[int], Addends] | None = None,
) -> ArenaPlan:
    """The most slots that fit into `size_bytes`, but no more than all keys can use.

    n_keys    experts of the model, all layers together
    bytes_of  bytes of the whole arena, as populated, with so many slots; grows with them
    beside    what of these is not slots, for the refusal; None: what no slots at all take

    Raises ConfigError with each addend, of slots and of bytes, and the smallest legal size where
    too few fit.
    """
    minimum = minimum_slots(top_k_batch)
    low, high = 0, max(minimum.n_slots, _slots_for_all(n_keys))
    while low < high:
        middle = (low + high + 1) // 2
        if bytes_of(middle) <= size_bytes:
            low = middle
        else:
            high = middle - 1
    if low < minimum.n_slots:
        least = minimum.n_slots
        others = (("tables", bytes_of(0)),) if beside is None else beside(least)
        raise ConfigError(_refusal(size_bytes, low, minimum, bytes_of(least), others))
    return ArenaPlan(low, bytes_of(low), slot_budget(low, top_k_batch))


def _full_budget(n_slots: int, top_k_batch: int) -> Budget:
    return Budget(
        n_slots=n_slots,
        demand=2 * top_k_batch,
        free_pool=min(MOST_FREE, n_slots // 8),
        hedge=HEDGE_SLOTS,
        lease_quota=min(MOST_LEASES, n_slots // 4),
        prefill_window=PREFILL_WINDOW,
        n_for_any=n_slots,
    )


def _slots_for_all(n_keys: int) -> int:
    """The fewest slots that hold every key beside the free pool and the hedged reads."""
    n_slots = n_keys + HEDGE_SLOTS
    while n_slots - min(MOST_FREE, n_slots // 8) - HEDGE_SLOTS < n_keys:
        n_slots += 1
    return n_slots


def _refusal(
    size_bytes: int, n_slots: int, minimum: Budget, smallest_bytes: int, others: Addends
) -> str:
    found = f"an arena of {size_bytes} bytes holds {n_slots} slots, wanted {minimum.n_slots}:"
    slots = smallest_bytes - sum(n_bytes for _, n_bytes in others)
    addends = ((f"{minimum.n_slots} slots", slots), *others)
    sizes = [f"  {name:<34}{n_bytes:>13}" for name, n_bytes in addends if n_bytes]
    last = f"smallest: {smallest_bytes} bytes"
    return "\n".join([found, *minimum.lines(), "in bytes:", *sizes, last])
