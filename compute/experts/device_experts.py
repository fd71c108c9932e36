"""Experts for a device that picks them itself: the miss client with a device cache before it.

Owns the registration of the arena, the copies into the device cache and the order of both.
Invariants, after DESIGN.md section 2: a victim's entry leaves the device's table on the stream that
launches before its slot is overwritten on the stream that copies; the source of a copy is `busy`
until the copy has ended; the new entry enters at a launch boundary after that, and the launching
stream waits for the copy's event; a copy whose key moved meanwhile is dropped. Nothing runs on the
device while a message is sent, but for copies. One thread uses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from compute.model.sources import ExpertMatrices
from protocol.wire.client import ExpertClient
from protocol.wire.messages import Added, Drop

from .arena_view import PieceShapes, pieces_of, slots_tensor
from .device_cache import DeviceCache, Promotion
from .miss_client import Hints, MissClient
from .registered_arena import RegisteredArena
from .request_io import Waiting
from .tiers import ExpertTiers

MOST_PROMOTIONS = 8  # a step: 150 MB of the released model's experts
_TIER_STEPS = 64  # steps between two writings of the tier bytes


@dataclass(frozen=True, slots=True)
class _Copy:
    """A promotion on its way."""

    promotion: Promotion
    source: int  # arena slot
    done: torch.cuda.Event | None


def _has_ended(copy: _Copy) -> bool:
    return copy.done is None or bool(copy.done.query())  # type: ignore[no-untyped-call]


class DeviceExperts(MissClient):
    """`places` is what the launches read; `fetch` and `commit` keep it true.

    client, shapes, waiting  as MissClient's
    places                   table and device cache
    most_promotions          keys a step that may be copied into the device cache
    """

    def __init__(
        self,
        client: ExpertClient,
        shapes: Sequence[PieceShapes],
        places: ExpertTiers,
        waiting: Waiting | None = None,
        *,
        most_promotions: int = MOST_PROMOTIONS,
    ) -> None:
        self.places = places
        self.n_moved = 0  # times that the tensor of addresses was replaced: graphs bake it in
        self.cache = DeviceCache(
            client.welcome.n_layers * client.welcome.n_experts, places.n_device
        )
        self._most_promotions = most_promotions
        self._copies: list[_Copy] = []
        self._registered: RegisteredArena | None = None
        self._copy_stream = None
        if places.device.type == "cuda":
            self._copy_stream = torch.cuda.Stream(places.device)  # type: ignore[no-untyped-call]
        self._entries: dict[tuple[int, int], int] = {}  # of the device's table, changed by copies
        super().__init__(client, shapes, waiting, places.device)

    def close(self) -> None:
        """Let go of the arena; nothing may be running."""
        self._abandon_copies()
        if self._registered is not None:
            self._registered.close()
            self._registered = None

    # for the runner

    def settle(self) -> None:
        """At a launch boundary: take finished copies, bring the device's table up to date."""
        for copy in [copy for copy in self._copies if _has_ended(copy)]:
            self._copies.remove(copy)
            self._finish(copy)
        changed = self._table.take_changed()
        if changed is None:
            self._replace_table()
        else:
            keys = changed | self._entries.keys()
            self.places.push(
                [(layer, expert, self._entry(layer, expert)) for layer, expert in keys]
            )
        self._entries.clear()

    def fetch(self, layer: int, picks: Sequence[int], hints: Hints = ()) -> None:
        """Bring a layer's absent picks into the arena; the device must be idle.

        Raises as `MissClient.stream` does.
        """
        row = self.cache.slot_of[layer * self.places.n_experts :]
        group = tuple(sorted(expert for expert in picks if row[expert] < 0))
        slots = self._table.slots[layer]
        self.io.misses += sum(slots[expert] < 0 for expert in group)
        with self._stall():
            self._fetch(layer, group, hints)
        self.settle()

    def commit(self, picks: NDArray[np.int64], n_misses: int) -> None:
        """End a token's step: picks [n_layers, top_k], of which n_misses were not there."""
        n_layers = len(picks)
        keys = (np.arange(n_layers)[:, None] * self.places.n_experts + picks).reshape(-1)
        n_hits = picks.size - n_misses
        self.io.hits += n_hits
        self.io.hits_device += min(n_hits, int((self.cache.slot_of[keys] >= 0).sum()))
        self._picks += [(layer, picks[layer].tolist()) for layer in range(n_layers)]
        self.end_step()
        self._promote(keys)

    # MissClient

    def stream(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[int, ExpertMatrices]]:
        """Yield each expert's matrices, ascending: from the device cache where they are there."""
        first = layer * self.places.n_experts
        device = {
            expert: slot
            for expert in experts
            if (slot := int(self.cache.slot_of[first + expert])) >= 0
        }
        if not device:
            yield from super().stream(layer, experts)
            return
        self.io.hits += len(device)
        self.io.hits_device += len(device)
        others = [expert for expert in experts if expert not in device]
        arena = super().stream(layer, others) if others else iter(())
        for expert in experts:
            if expert in device:
                yield expert, pieces_of(self.places.cache[device[expert]], self._shapes[layer])
            else:
                yield next(arena)
        for _ in arena:
            pass
        self._picks.append((layer, list(device)))

    def tiers(self) -> bytes:
        """Return where every expert is: 2 in the device cache, else as MissClient."""
        where = np.frombuffer(super().tiers(), np.uint8).copy()
        where[self.cache.slot_of >= 0] = 2
        return where.tobytes()

    def busy_slots(self) -> Sequence[int]:
        """Arena slots that unfinished copies read."""
        return [copy.source for copy in self._copies if not _has_ended(copy)]

    def take_changes(self) -> None:
        """As MissClient's; copies end first, since what is retired may be their source."""
        self._end_copies()
        super().take_changes()
        self.settle()

    def _resized(self, resized: Drop | Added) -> None:
        """Register what remains after a Drop, or what was Added."""
        if self._registered is not None:
            self._registered.resize(resized.n_slots)

    def _attach(self) -> None:
        is_new = self.client.welcome.arena_id != self._arena_id
        if is_new:
            self.close()
        super()._attach()
        if not is_new:
            return
        welcome, arena = self.client.welcome, self.client.arena
        self._registered = RegisteredArena(arena, welcome.n_slots, self.places.device)
        self._slots = slots_tensor(arena)
        self.n_moved += self.places.set_arena(self._registered.starts())

    def _recover(self, lost: Exception) -> None:
        self._abandon_copies()
        super()._recover(lost)  # type: ignore[arg-type]

    # copies

    def _promote(self, keys: NDArray[np.int64]) -> None:
        """Start copies of keys that only the arena holds; nothing of the step is running."""
        if not self.cache.n_slots:
            return
        self.cache.use(keys)
        promotable = np.array(
            [key for key in keys.tolist() if self._arena_slot(key) >= 0], np.int64
        )
        for promotion in self.cache.begin(promotable, self._most_promotions - len(self._copies)):
            self._start(promotion)
        if self._step % _TIER_STEPS == 0:
            tier = self.client.arena.tier
            tier[:] = self.cache.tier_bytes().reshape(tier.shape)

    def _start(self, promotion: Promotion) -> None:
        if promotion.victim >= 0:
            layer, expert = divmod(promotion.victim, self.places.n_experts)
            self.places.push([(layer, expert, self._entry(layer, expert))])
        source = self._arena_slot(promotion.key)
        rooms = self.client.arena.layout.rooms
        start, size = rooms.end(source), rooms.size(source)
        target = self.places.cache[promotion.slot, :size]
        done = None
        if self._copy_stream is None:
            target.copy_(self._slots[start : start + size])
        else:
            self._copy_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._copy_stream):
                target.copy_(self._slots[start : start + size], non_blocking=True)
                done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                done.record()
        self._copies.append(_Copy(promotion, source, done))

    def _finish(self, copy: _Copy) -> None:
        """Enter a copy that has ended, unless its key moved meanwhile."""
        key = copy.promotion.key
        if self._arena_slot(key) != copy.source:
            self.cache.abandon(copy.promotion)
            return
        if copy.done is not None:
            torch.cuda.current_stream().wait_event(copy.done)
        self.cache.finish(copy.promotion)
        layer, expert = divmod(key, self.places.n_experts)
        self._entries[layer, expert] = copy.promotion.slot

    def _end_copies(self) -> None:
        for copy in self._copies:
            if copy.done is not None:
                copy.done.synchronize()
            self._finish(copy)
        self._copies.clear()

    def _abandon_copies(self) -> None:
        for copy in self._copies:
            if copy.done is not None:
                copy.done.synchronize()
            self.cache.abandon(copy.promotion)
        self._copies.clear()

    # table

    def _arena_slot(self, key: int) -> int:
        layer, expert = divmod(key, self.places.n_experts)
        return int(self._table.slots[layer][expert])

    def _entry(self, layer: int, expert: int) -> int:
        key = layer * self.places.n_experts + expert
        return self.places.entry(int(self.cache.slot_of[key]), self._table.slots[layer][expert])

    def _replace_table(self) -> None:
        arena = np.array(self._table.slots, np.int64)
        device = self.cache.slot_of.reshape(arena.shape)
        entries = np.where(arena >= 0, arena + self.places.n_device, -1)
        self.places.replace(np.where(device >= 0, device, entries).astype(np.int32))
