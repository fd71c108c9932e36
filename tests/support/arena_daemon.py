"""An expert daemon within the process: an arena filled from a checkpoint, misses at will.

Plays `ExpertClient` and the daemon behind it for tests of what runs on a device.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.arena.layout import PIECES, ArenaLayout, ArenaView
from protocol.files.checkpoint import Checkpoint
from protocol.wire.codec import encode
from protocol.wire.messages import Changes, MissRequest, SlotChanges, Welcome

from .local_sources import LocalSources

Key = tuple[int, int]


class ArenaDaemon:
    """`drop` makes a key absent; `asked` lists the requests: (layer, experts, busy, hints)."""

    def __init__(self, checkpoint: Checkpoint, n_slots: int, *, full: bool = True) -> None:
        config = checkpoint.config
        image = checkpoint.slice_map.layouts[0].image
        self._sources = LocalSources(checkpoint)
        self._config = config
        self.layout = ArenaLayout.plan(
            n_layers=config.n_layers,
            n_experts=config.n_experts,
            n_slots_max=n_slots,
            slot_bytes=image.slot_bytes,
            row_bytes=max((table.row_bytes for table in checkpoint.engram_tables), default=32),
            ring_rows=64,
            piece_offsets=image.piece_offsets,
            piece_bytes=image.piece_bytes,
        )
        # Slots begin at whole pages, as those of a mapping do.
        whole = np.zeros(self.layout.n_bytes + 8192, np.uint8)
        start = -whole.ctypes.data % 4096
        self._memory = whole[start : start + self.layout.n_bytes]
        self.arena = ArenaView(self._memory.data, self.layout)
        self.n_slots = n_slots
        self.table = np.full((config.n_layers, config.n_experts), -1, "<i4")
        self._owner: list[Key | None] = [None] * n_slots
        self._changed: dict[Key, int] = {}
        self.version = 1
        self._next = 0
        self.applied = 0
        self.epoch_done = self._epoch = 0
        self.asked: list[tuple[int, tuple[int, ...], tuple[int, ...], tuple[Key, ...]]] = []
        self.touched: list[tuple[int, list[Key]]] = []
        self.hinted: list[tuple[int, int, tuple[int, ...]]] = []  # step, layer, experts
        self._pushed: list[Changes] = []
        self._rows: dict[int, NDArray[np.uint8]] = {}
        self._n_requests = 0
        self.shuffle: random.Random | None = None  # in its order reads end
        self.spoils = False  # whether a request costs every slot that it leaves open its bytes
        self.once_spoiled: Callable[[int], None] = lambda _layer: None  # told the request's layer
        self.lost = ""
        self.events: list[str] = []  # what was asked and told, in order
        self.top_k_batch = config.top_k
        self.max_rows = 64
        if full:
            keys = [(la, ex) for la in range(config.n_layers) for ex in range(config.n_experts)]
            for key in keys[:n_slots]:
                self._load(key, avoid=())
        self.welcome = self._welcome()

    def drop(self, layer: int, expert: int) -> None:
        """Make a key absent, as an eviction does; told with the next changes."""
        slot = int(self.table[layer, expert])
        if slot >= 0:
            self._owner[slot] = None
            self._set((layer, expert), -1)
            self._pushed.append(Changes(self.applied, self.version, self._since(self.applied)))

    # the client's methods

    def miss(
        self,
        layer: int,
        experts: Sequence[int],
        *,
        busy: Sequence[int] = (),
        step: int = 0,
        hints: Sequence[Key] = (),
        give_up: Callable[[], bool] = lambda: False,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> SlotChanges:
        """Load what is absent of the layer's experts."""
        del give_up
        # What does not fit the protocol is refused here as it is before it leaves a real client.
        parts = (tuple(map(int, experts)), tuple(map(int, busy)))
        wanted = tuple((int(la), int(ex)) for la, ex in hints)
        encode(MissRequest(1, step, int(layer), *parts, self.applied, 0, wanted))
        self.events.append("miss")
        self.asked.append((layer, tuple(experts), tuple(busy), tuple(hints)))
        meanwhile()
        own = {int(self.table[layer, expert]) for expert in experts} | set(busy)
        before = self.applied
        if self.spoils:
            self._spoil_all_but(own)
            self.once_spoiled(layer)
        absent = [expert for expert in experts if self.table[layer, expert] < 0]
        if self.shuffle is not None:
            self.shuffle.shuffle(absent)
        for expert in absent:
            own.add(self._load((layer, expert), avoid=own))
        n_read = len(absent)
        slots = tuple(int(self.table[layer, expert]) for expert in experts)
        changes = self._since(before)
        return SlotChanges(
            1, before, self.version, slots, changes, (), n_read * self.layout.slot_bytes, 1.0, True
        )

    def changes(self) -> list[Changes]:
        """What was dropped since."""
        pushed, self._pushed = self._pushed, []
        return pushed

    def memory_changes(self) -> list[Any]:
        """No resize."""
        return []

    def ack(self, applied: int) -> None:
        """Note what the engine's table reflects."""
        self.events.append("ack")
        self.applied = applied

    def begin_epoch(self) -> int:
        """Number a launch."""
        self._epoch += 1
        return self._epoch

    def close_window(self) -> None:
        """None is left open."""

    def touch(self, step: int, picks: NDArray[Any]) -> None:
        """Note a step's picks."""
        self.events.append("touch")
        self.touched.append((step, [(int(layer), int(expert)) for layer, expert in picks]))

    def hint(self, step: int, layer: int, experts: Sequence[int]) -> None:
        """Note a hint; none is followed."""
        self.events.append("hint")
        self.hinted.append((step, layer, tuple(experts)))

    def request_rows(self, table: int, rows: NDArray[Any], others: Sequence[Any] = ()) -> int:
        """Read rows of some tables."""
        parts = []
        for number, wanted in ((table, rows), *others):
            (handle,) = self._sources.request_all([(number, wanted.astype(np.int64))])
            parts.append(self._sources.take(handle).numpy())
        self._n_requests += 1
        self._rows[self._n_requests] = np.concatenate(parts)
        self.events.append("rows")
        return self._n_requests

    def take_rows(self, handle: int) -> NDArray[np.uint8]:
        """Give the rows of a request."""
        return self._rows.pop(handle)

    def close(self) -> None:
        """Nothing is open."""

    # the daemon's side

    def _welcome(self) -> Welcome:
        return Welcome(
            session=1,
            generation=1,
            arena_id=b"a" * 16,
            arena_bytes=self.layout.n_bytes,
            n_layers=self._config.n_layers,
            n_experts=self._config.n_experts,
            n_slots=self.n_slots,
            slot_bytes=self.layout.slot_bytes,
            max_experts=self._config.top_k,
            lease_quota=0,
            descriptor_address="arena.sock",
            version=self.version,
            table=self.table.tobytes(),
            scores=bytes(4 * self.n_slots),
        )

    def _set(self, key: Key, slot: int) -> None:
        self.version += 1
        self.table[key] = slot
        self._changed[key] = self.version

    def _since(self, applied: int) -> tuple[tuple[int, int, int], ...]:
        keys = sorted(key for key, version in self._changed.items() if version > applied)
        return tuple((*key, int(self.table[key])) for key in keys)

    def _load(self, key: Key, avoid: Sequence[int] | set[int]) -> int:
        slot = self._free_slot(avoid)
        owner = self._owner[slot]
        if owner is not None:
            self._set(owner, -1)
        ((_, matrices),) = self._sources.stream(key[0], [key[1]])
        for name, piece in zip(PIECES, matrices, strict=True):
            self.arena.piece(slot, name)[:] = piece.contiguous().numpy().tobytes()
        self._owner[slot] = key
        self._set(key, slot)
        return slot

    def _spoil_all_but(self, own: set[int]) -> None:
        """Evict whoever is not named, and leave bytes behind whose products overflow."""
        for slot, owner in enumerate(self._owner):
            if owner is not None and slot not in own:
                self._owner[slot] = None
                self._set(owner, -1)
                for name in PIECES:
                    self.arena.piece(slot, name)[:] = bytes([254]) * len(
                        self.arena.piece(slot, name)
                    )

    def _free_slot(self, avoid: Sequence[int] | set[int]) -> int:
        if None in self._owner:
            return self._owner.index(None)
        for slot in self._in_turn():
            if slot not in avoid:
                return slot
        raise AssertionError("no slot may be taken")

    def _in_turn(self) -> Iterator[int]:
        for _ in range(self.n_slots):
            self._next = (self._next + 1) % self.n_slots
            yield self._next
