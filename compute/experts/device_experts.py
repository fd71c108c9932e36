"""Experts for a device that picks them itself: the miss client with a device cache before it.

Owns the device's table, the registration of the arena, and when copies into the device cache begin
and count. Invariants, after DESIGN.md section 2: a victim's entry leaves the device's table on the
stream that launches before its slot is overwritten on the stream that copies; the source of a copy
is `busy` until the copy has ended; the new entry enters at a launch boundary after that. A slot of
a chunk that is not registered yet counts as absent on the device: a pick there waits for its chunk,
which is registered next. Where a message leaves that may change a slot, nothing runs on the device
but layers that will run again, whose results nobody keeps; copies begin behind it, and it names
their sources. A Touch changes no slot. One thread uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from compute.model.sources import ExpertMatrices, Resident
from compute.processors import n_processors
from protocol.wire.client import ExpertClient
from protocol.wire.messages import Added, Drop

from .arena_view import PieceShapes, pieces_of
from .device_cache import DeviceCache, Keys, keys_of
from .device_copies import DeviceCopies
from .miss_client import Hints, MissClient
from .registered_arena import RegisteredArena, Registrar
from .request_io import Waiting
from .tiers import ExpertTiers

MOST_PROMOTED_BYTES = 160_000_000  # under way at a time: 8 of the released model's experts
MOST_PROMOTED = 8  # under way at a time, whatever their size: so many slots the daemon does without
_FILLING = 4  # times as many where slots of the device cache are free, which the bus alone limits
_FILLING_SHARE = 8  # a copy's source is one slot of the arena in so many at most
_TIER_STEPS = 64  # steps between two writings of the tier bytes
_SPARE_PROCESSORS = 4  # from so many on one of them may look for an answer all the time


class DeviceExperts(MissClient):
    """`places` is what the launches read; `settle` and `fetch` keep it true.

    client, shapes, waiting  as MissClient's
    places                   table and device cache
    most_promoted            experts that are chosen or under way to the device cache at a time,
    most_promoted_bytes      and bytes of them; more where the cache has free slots
    registrar                None: the device's own
    """

    def __init__(
        self,
        client: ExpertClient,
        shapes: Sequence[PieceShapes],
        places: ExpertTiers,
        waiting: Waiting | None = None,
        *,
        most_promoted: int = MOST_PROMOTED,
        most_promoted_bytes: int = MOST_PROMOTED_BYTES,
        registrar: Registrar | None = None,
    ) -> None:
        self.places = places
        self.cache = DeviceCache(
            client.welcome.n_layers * client.welcome.n_experts, places.n_device
        )
        most = min(max(1, most_promoted_bytes // places.slot_bytes), most_promoted)
        filling = max(most, min(_FILLING * most, client.n_slots // _FILLING_SHARE))
        self._copies = DeviceCopies(
            self.cache, places, self._arena_slot, self._is_readable, most, filling
        )
        self._registrar = registrar
        self._registered: RegisteredArena | None = None
        self._untold: tuple[int, NDArray[np.uint16]] | None = None  # the last step and its picks
        self._uncounted: NDArray[np.uint16] | None = None  # the same, told by now
        self._begins_beside = False  # whether the request in hand has copies begin behind it
        self._rest: Callable[[], Hints] | None = None  # tells what goes behind it as hints
        client.spins = places.device.type == "cuda" and n_processors() >= _SPARE_PROCESSORS
        super().__init__(client, shapes, waiting, places.device)

    def close(self) -> None:
        """Let go of the arena; nothing may be running."""
        self._copies.abandon()
        if self._registered is not None:
            self._registered.close()
            self._registered = None

    # for the runner

    def settle(self, *, is_busy: bool = True) -> None:
        """At a launch boundary: bring the device's table up to date.

        is_busy  whether the device has something to do meanwhile; where not, only what the arena
                 has no more, or has anew, is brought up to date

        A daemon known to be lost is waited for. Raises DaemonLost and RequestCancelled.
        """
        self.recover_if_lost()
        self._enter(moved=is_busy)

    def begin_copies(self) -> None:
        """At a launch boundary: begin the copies chosen, unless the arena's daemon is lost."""
        if self._copies.has_chosen and not self.client.lost:
            if self._copies.moved:  # a victim's entry leaves before its slot is overwritten
                self._enter(moved=True)
            self._copies.begin_chosen()

    def _enter(self, *, moved: bool) -> None:
        """Write what has changed into the device's table, with what came or went beside it.

        An old entry does no harm for a while: a slot of the device cache is overwritten by a copy,
        before which all is written, one of the arena after a change that is always written.
        """
        self._copies.take_ended()
        changed = self._table.take_changed()
        has_news = self._registered is not None and self._registered.take_news()
        if changed is None or has_news:
            self._replace_table()
            self._copies.moved.clear()
            return
        keys = changed | self._copies.moved if moved else changed
        self.places.push([(layer, expert, self._entry(layer, expert)) for layer, expert in keys])
        self._copies.moved -= keys

    def fetch(
        self, layer: int, picks: Sequence[int], rest: Callable[[], Hints] = lambda: ()
    ) -> bool:
        """Bring a layer's absent picks to where the device reads.

        rest  keys that may be wanted later in the step, asked for once the request has left

        The device may be running what is to run again: slots that it reads are overwritten.
        Returns whether any pick was absent: then `rest` was called, or the device has ended what it
        did since its daemon was lost.
        Raises as `MissClient.stream` does.
        """
        self.recover_if_lost()  # the whole table, before anything is concluded from it
        row = self.cache.slot_of[layer * self.places.n_experts :]
        group = tuple(sorted(expert for expert in picks if row[expert] < 0))
        slots = self._table.slots[layer]
        n_absent = sum(slots[expert] < 0 for expert in group)
        self.io.misses += n_absent
        with self._stall():
            if n_absent:  # else all of them lie in chunks that are not registered yet
                with self._beside(len(group), rest):
                    self._fetch(layer, group)
            if self._registered is not None:
                self._registered.wait_for(self._table.slots[layer][expert] for expert in group)
        self._enter(moved=True)
        return n_absent > 0

    def end_token(self, picks: NDArray[np.int64], n_misses: int, n_on_device: int) -> None:
        """Note a token's picks [n_layers, top_k]: n_misses were nowhere, n_on_device in the cache.

        Nobody is told before `report`.
        """
        n_hits = picks.size - n_misses
        self.io.hits += n_hits
        self.io.hits_device += min(n_hits, n_on_device)
        pairs = np.empty((picks.size, 2), np.uint16)
        pairs[:, 0] = np.repeat(np.arange(len(picks)), picks.shape[1])
        pairs[:, 1] = picks.reshape(-1)
        self._untold = (self._step, pairs)
        self._step += 1

    @contextmanager
    def _beside(self, n_experts: int, rest: Callable[[], Hints]) -> Iterator[None]:
        """Have copies and hints go behind the request for so many experts that the block sends.

        Where copies would leave the daemon less than half of its slots, those under way are waited
        for instead, and those chosen begin later.
        """
        self._rest = rest
        n_busy = len(self._copies.sources(chosen=True))
        self._begins_beside = 2 * (n_experts + n_busy) <= self.client.n_slots
        if not self._begins_beside:
            self._copies.finish()
        try:
            yield
        finally:
            self._begins_beside, self._rest = False, None

    def _has_asked(self) -> None:
        """While the drive is waited for the way to the device is free."""
        if self._begins_beside:
            self.begin_copies()
        rest, self._rest = self._rest, None
        for layer, keys in groupby(rest() if rest is not None else (), lambda key: key[0]):
            self.hint(layer, [expert for _, expert in keys])

    def report(self, *, acknowledges: bool = True) -> None:
        """Say and choose all that `report_part` would.

        acknowledges  False where a request is to follow, which does that as well
        """
        while self.report_part(acknowledges=acknowledges):
            pass

    def report_part(self, *, acknowledges: bool = True) -> bool:
        """Do the next of what a token leaves to be done; whether there was anything.

        Acknowledge the table, tell the daemon the token's picks, choose what is to be copied to the
        device. Nothing of it changes what the device reads: it may be running, by a table that has
        all that is acknowledged. A lost daemon is left for the next request to find.
        """
        if self._untold is not None:
            step, pairs = self._untold
            self._untold, self._uncounted = None, pairs
            self._touch(step, pairs)
        elif self._uncounted is not None:
            pairs, self._uncounted = self._uncounted, None
            if self.cache.n_slots:
                self._choose(keys_of(pairs[:, 0], pairs[:, 1], self.places.n_experts))
        elif acknowledges and self._table.version != self._acked and not self.client.lost:
            with self._if_there("beside a step"):
                self.acknowledge()
        else:
            return False
        return True

    def hint(self, layer: int, experts: Sequence[int]) -> None:
        """Tell which experts a layer of this step may want, best first; a loss costs nothing.

        The device may be running: what is read on a hint goes into free slots.
        """
        self.client.hint(self._step, layer, experts)

    def take_arrived(self) -> None:
        """Before a step, the device idle: what the daemon says it has retired or resized.

        What only an answer changed is acknowledged by `report`, beside what the device does.
        """
        with self._if_there("between steps"):
            if self._take_new():
                self.acknowledge()
                self._enter(moved=False)

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
            yield from self._from_arena(layer, experts)
            return
        self.io.hits += len(device)
        self.io.hits_device += len(device)
        others = [expert for expert in experts if expert not in device]
        arena = self._from_arena(layer, others) if others else iter(())
        for expert in experts:
            if expert in device:
                yield expert, pieces_of(self.places.cache[device[expert]], self._shapes[layer])
            else:
                yield next(arena)
        for _ in arena:
            pass
        self._picks.append((layer, list(device)))

    def _from_arena(
        self, layer: int, experts: Sequence[int]
    ) -> Iterator[tuple[int, ExpertMatrices]]:
        """As MissClient's `stream`, which wants nearly all of the arena: copies end before it."""
        self._copies.finish()
        return super().stream(layer, experts)

    def resident(self, layer: int, experts: Sequence[int]) -> Resident:
        """Say where those of `experts` that the device cache holds begin; they count as picked."""
        self.check_cancelled()
        slots = self.cache.slot_of[layer * self.places.n_experts + np.asarray(experts, np.int64)]
        found = slots >= 0
        starts = np.zeros(len(experts), np.int64)
        starts[found] = self.places.host_addresses[slots[found]]
        n_found = int(found.sum())
        if n_found:
            self.io.hits += n_found
            self.io.hits_device += n_found
            self._picks.append((layer, np.asarray(experts)[found].tolist()))
        shapes = self._shapes[layer]
        return Resident(starts, shapes.offsets, shapes.shapes)

    def held(self, layer: int, expert: int) -> ExpertMatrices | None:
        """Return an expert by what each slot of the device cache has in it, to compare with."""
        slots = np.flatnonzero(self.cache.key_in == layer * self.places.n_experts + expert)
        if len(slots) != 1:
            return None
        return pieces_of(self.places.cache[int(slots[0])], self._shapes[layer])

    def tiers(self) -> bytes:
        """Return where every expert is: 2 in the device cache, else as MissClient."""
        where = np.frombuffer(super().tiers(), np.uint8).copy()
        where[self.cache.slot_of >= 0] = 2
        return where.tobytes()

    def busy_slots(self) -> Sequence[int]:
        """Arena slots that unfinished copies read, and those that begin beside the request.

        A request acknowledges the table: no copy reads a slot that this has no more.
        """
        self._copies.drop_moved()
        return self._copies.sources(chosen=self._begins_beside)

    def take_changes(self) -> None:
        """As MissClient's; then the device's table is up to date as well."""
        super().take_changes()
        self._enter(moved=False)

    def acknowledge(self) -> None:
        """As ArenaLink's, once no copy reads a slot that the table has no more."""
        self._copies.drop_moved()
        super().acknowledge()

    def _stop_reading(self) -> None:
        """End the copies, since what is retired may be their source."""
        self._copies.finish()

    def _resized(self, resized: Drop | Added) -> None:
        """Register what was Added, in the background; let go of what a Drop names."""
        if self._registered is not None:
            self._registered.resize(resized.n_slots)

    def _attach(self) -> None:
        is_new = self.client.welcome.arena_id != self._arena_id
        if is_new:
            self.close()
        super()._attach()
        if not is_new:
            if self._registered is not None:  # it may have been resized before it was lost
                self._registered.resize(self.client.welcome.n_slots)
            return
        welcome, arena = self.client.welcome, self.client.arena
        self._registered = RegisteredArena(
            arena, welcome.n_slots, self.places.device, self._registrar
        )
        self._copies.attach(arena)
        self.places.set_arena(self._registered.starts())

    def _drain(self) -> None:
        """Let end what was launched: a request may find its daemon lost while layers run."""
        if self.places.device.type == "cuda":
            torch.cuda.current_stream(self.places.device).synchronize()

    def _recover(self, lost: Exception) -> None:
        self._drain()
        self._copies.abandon()
        super()._recover(lost)  # type: ignore[arg-type]

    # cache and table

    def _choose(self, keys: Keys) -> None:
        """Count a step's keys and choose which of them move to the device."""
        self.cache.use(keys)
        self._copies.choose(keys)
        if self._step % _TIER_STEPS == 0:
            tier = self.client.arena.tier
            tier[:] = self.cache.tier_bytes().reshape(tier.shape)

    def _arena_slot(self, key: int) -> int:
        layer, expert = divmod(key, self.places.n_experts)
        return int(self._table.slots[layer][expert])

    def _is_readable(self, key: int) -> bool:
        """Whether the device may read the key in the arena."""
        slot = self._arena_slot(key)
        return slot >= 0 and (self._registered is None or bool(self._registered.ready[slot]))

    def _entry(self, layer: int, expert: int) -> int:
        key = layer * self.places.n_experts + expert
        slot = self._arena_slot(key) if self._is_readable(key) else -1
        return self.places.entry(int(self.cache.slot_of[key]), slot)

    def _replace_table(self) -> None:
        arena = np.array(self._table.slots, np.int64)
        device = self.cache.slot_of.reshape(arena.shape)
        may_read = arena >= 0
        if self._registered is not None:
            may_read &= self._registered.ready[arena]  # of -1 the last slot's, which is no matter
        entries = np.where(may_read, arena + self.places.n_device, -1)
        self.places.replace(np.where(device >= 0, device, entries).astype(np.int32))
