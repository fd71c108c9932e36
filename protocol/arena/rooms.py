"""Slots of several sizes, for models whose layers store their experts in several formats.

A room is a size of slot. The first `n_common` slots are of room 0, the largest, which takes any
expert: what an arena must be able to do it can do with them alone. Behind them stand blocks of
slots, all alike, in which each room has as many slots as layers have experts of its size, spread
evenly. So each layer has the same share of the arena, an expert takes what it needs, and the first
n slots of an arena are an arena for any n. A model of one size has one room, and blocks of a slot.

Pure. Slots count from 0, bytes from the first slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import gcd

PAGE_BYTES = 4096
HUGE_BYTES = 2 << 20
MOST_ROOMS = 8
MIN_BLOCK_SLOTS = 16  # so that what a block is padded by is little of it
PADDED_FROM_BYTES = 1 << 20  # blocks of smaller slots are not padded to HUGE_BYTES


@dataclass(frozen=True, slots=True)
class Rooms:
    """The sizes, how many layers need each, and where the common slots end."""

    sizes: tuple[int, ...]  # bytes of a slot, strictly descending, multiples of PAGE_BYTES
    n_layers: tuple[int, ...]  # layers whose experts are of each size, at least one
    n_common: int  # a multiple of the block's slots; 0 where there is one size

    @classmethod
    def of(cls, slot_bytes: Sequence[int], n_common: int) -> Rooms:
        """Return the rooms for layers whose experts take so many bytes each.

        n_common  slots that an arena needs at least, rounded up to whole blocks here

        Of more than MOST_ROOMS sizes those are joined by which least is lost.
        """
        counts = dict.fromkeys(sorted(slot_bytes, reverse=True), 0)
        for size in slot_bytes:
            counts[size] += 1
        while len(counts) > MOST_ROOMS:
            pairs = pairwise(counts)
            larger, smaller = min(pairs, key=lambda pair: (pair[0] - pair[1]) * counts[pair[1]])
            counts[larger] += counts.pop(smaller)
        rooms = cls(tuple(counts), tuple(counts.values()), 0)
        if len(counts) == 1:
            return rooms
        n_block = len(rooms.block)
        return cls(rooms.sizes, rooms.n_layers, -(-n_common // n_block) * n_block)

    @property
    def is_uniform(self) -> bool:
        """Whether all slots are alike."""
        return len(self.sizes) == 1

    @property
    def block(self) -> tuple[int, ...]:
        """The room of each slot of a block."""
        return (0,) if self.is_uniform else _block(self.n_layers)

    def room_for(self, slot_bytes: int) -> int:
        """Return the smallest room that takes an expert of this size."""
        return max(room for room, size in enumerate(self.sizes) if size >= slot_bytes)

    def room(self, slot: int) -> int:
        """Return a slot's room."""
        if self.is_uniform or slot < self.n_common:
            return 0
        block = self.block
        return block[(slot - self.n_common) % len(block)]

    def size(self, slot: int) -> int:
        """Return a slot's bytes."""
        return self.sizes[self.room(slot)]

    def end(self, n_slots: int) -> int:
        """Return where slot number `n_slots` begins, and so how far the slots before it reach."""
        if self.is_uniform:
            return n_slots * self.sizes[0]
        block = self.block
        common = min(n_slots, self.n_common)
        start = _at(self.sizes, (0,) * len(block), common)
        return start + _at(self.sizes, block, n_slots - common)

    def n_for_any(self, n_slots: int) -> int:
        """Return how many of the first `n_slots` take any expert; no layer has fewer to take."""
        if self.is_uniform:
            return n_slots
        block = self.block
        common = min(n_slots, self.n_common)
        n_blocks, rest = divmod(n_slots - common, len(block))
        return common + n_blocks * block.count(0) + block[:rest].count(0)

    @property
    def chunk_slots(self) -> int:
        """The fewest slots, in whole blocks, whose bytes are a multiple of HUGE_BYTES."""
        block = self.block
        n_bytes = _at(self.sizes, block, len(block))
        return len(block) * (HUGE_BYTES // gcd(HUGE_BYTES, n_bytes))


@lru_cache(maxsize=64)
def _block(n_layers: tuple[int, ...]) -> tuple[int, ...]:
    """Spread the rooms evenly: at each place the one that is furthest behind its share."""
    divisor = gcd(*n_layers)
    shares = [count // divisor for count in n_layers]
    period = sum(shares)
    given = [0] * len(shares)
    rooms = []
    for place in range(1, period + 1):
        room = max(range(len(shares)), key=lambda r: (place * shares[r] - given[r] * period, -r))
        given[room] += 1
        rooms.append(room)
    return tuple(rooms) * -(-MIN_BLOCK_SLOTS // period)


@lru_cache(maxsize=64)
def _starts(sizes: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    """Where each slot of a block begins, and at last the bytes of the block with its padding."""
    *starts, end = accumulate((sizes[room] for room in block), initial=0)
    alignment = HUGE_BYTES if len(sizes) > 1 and sizes[0] >= PADDED_FROM_BYTES else PAGE_BYTES
    return (*starts, -(-end // alignment) * alignment)


def _at(sizes: tuple[int, ...], block: tuple[int, ...], n_slots: int) -> int:
    starts = _starts(sizes, block)
    n_blocks, rest = divmod(n_slots, len(block))
    return n_blocks * starts[-1] + starts[rest]
