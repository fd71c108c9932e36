"""Where everything stands in the arena.

The arena is one file in memory. Its first page, the identity page, says which layout and which
counts it was made with; every offset follows from the counts. PROTOCOL.md gives it byte by byte.

Invariants: sections do not overlap and stand in the order of SECTIONS; the engine's pages share no
page with anything that the daemon writes; slots start at multiples of 4096. Pure: no I/O here, any
buffer will do.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from protocol.errors import ConfigError

from .rooms import HUGE_BYTES, MOST_ROOMS, PAGE_BYTES, Rooms

HUGE_FROM_BYTES = 64 << 20  # slots of at least this size start at a multiple of HUGE_BYTES

PIECES = ("gate", "gate_scale", "up", "up_scale", "down", "down_scale")
PIECE_ALIGNMENT = 256

SECTIONS = (
    "identity",
    "epochs",
    "tier",
    "table_lock",
    "table",
    "headers",
    "policy",
    "verified",
    "counters",
    "pieces",
    "ring",
    "slots",
)
N_EPOCH_WORDS = 512
APPLIED, EPOCH_DONE, EPOCH_LAUNCHED = range(3)  # words of the epochs section
N_COUNTERS = 512
POLICY_GLOBAL_BYTES = 4096
POLICY_KEY_BYTES = 16
PIECES_LAYER_BYTES = 2 * len(PIECES) * 8

LIMITS = {
    "n_layers": (1, 1 << 12),
    "n_experts": (1, 1 << 12),
    "n_slots_max": (1, 1 << 22),
    "slot_bytes": (PAGE_BYTES, 1 << 36),
    "row_bytes": (0, 1 << 20),
    "ring_rows": (0, 1 << 24),
}


class SlotState(IntEnum):
    """What a slot holds; DESIGN's edges are the only legal ones."""

    FREE = 0
    LOADING = 1
    READY = 2
    RETIRING = 3


HEADER = np.dtype(
    {
        "names": [
            "state",
            "layer",
            "expert",
            "generation",
            "checksum",
            "version",
            "score",
            "last_use",
        ],
        "formats": ["<u4", "<u2", "<u2", "<u8", "<u8", "<u8", "<f8", "<u8"],
        "offsets": [0, 4, 6, 8, 16, 24, 32, 40],
        "itemsize": 64,
    }
)


def _up(n_bytes: int, multiple: int) -> int:
    return -(-n_bytes // multiple) * multiple


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Every section's offset in the arena, from its counts. Build it with `plan`."""

    n_layers: int
    n_experts: int
    n_slots_max: int  # slots that the file has room for
    slot_bytes: int  # of the largest slot, a multiple of 4096
    row_bytes: int  # one Engram row: values, then scales
    ring_rows: int
    rooms: Rooms
    piece_offsets: tuple[int, ...]  # inside a largest slot, in the order of PIECES
    piece_bytes: tuple[int, ...]
    offsets: tuple[int, ...]  # of each section, in the order of SECTIONS
    sizes: tuple[int, ...]  # bytes of each section, without padding
    n_bytes: int  # of the whole file, sparse

    @classmethod
    def plan(
        cls,
        *,
        n_layers: int,
        n_experts: int,
        n_slots_max: int,
        slot_bytes: int,
        row_bytes: int,
        ring_rows: int,
        piece_offsets: tuple[int, ...],
        piece_bytes: tuple[int, ...],
        rooms: Rooms | None = None,
    ) -> ArenaLayout:
        """The layout for these counts; raises ConfigError on one out of range.

        rooms  None: all slots are of `slot_bytes`
        """
        rooms = rooms or Rooms.of([slot_bytes], 0)
        counts = {
            "n_layers": n_layers,
            "n_experts": n_experts,
            "n_slots_max": n_slots_max,
            "slot_bytes": slot_bytes,
            "row_bytes": row_bytes,
            "ring_rows": ring_rows,
        }
        _check_counts(counts)
        _check_rooms(rooms, slot_bytes)
        _check_pieces(piece_offsets, piece_bytes, slot_bytes)
        sizes = _sizes(counts, rooms)
        offsets, n_bytes = _places(sizes)
        return cls(
            **counts,
            rooms=rooms,
            piece_offsets=piece_offsets,
            piece_bytes=piece_bytes,
            offsets=offsets,
            sizes=tuple(sizes[name] for name in SECTIONS),
            n_bytes=n_bytes,
        )

    @property
    def n_keys(self) -> int:
        """Number of (layer, expert) pairs."""
        return self.n_layers * self.n_experts

    def offset(self, section: str) -> int:
        """Where a section of SECTIONS begins."""
        return self.offsets[SECTIONS.index(section)]

    def size(self, section: str) -> int:
        """Bytes of a section, without padding."""
        return self.sizes[SECTIONS.index(section)]

    @property
    def slots_offset(self) -> int:
        """Where slot 0 begins."""
        return self.offsets[-1]

    @property
    def bookkeeping_bytes(self) -> int:
        """All that stands before the slots and is populated: up to the end of the row ring."""
        return _up(self.offset("ring") + self.size("ring"), PAGE_BYTES)

    @property
    def engine_pages(self) -> tuple[int, int]:
        """(offset, bytes) of the whole pages that the engine writes: epoch words and tier bytes."""
        begin = self.offset("epochs")
        return begin, self.offset("table_lock") - begin

    def slot_offset(self, slot: int) -> int:
        """Where a slot begins in the file."""
        if not 0 <= slot < self.n_slots_max:
            raise IndexError(f"slot {slot}: the arena has {self.n_slots_max}")
        return self.slots_offset + self.rooms.end(slot)

    def slots_range(self, first: int, end: int) -> tuple[int, int]:
        """(offset, bytes) in the file of the slots from `first` on, before `end`."""
        start = self.rooms.end(first)
        return self.slots_offset + start, self.rooms.end(end) - start

    def populated_bytes(self, n_slots: int) -> int:
        """Bytes of an arena that uses the first `n_slots`: bookkeeping and slots."""
        return self.bookkeeping_bytes + self.rooms.end(n_slots)

    @property
    def chunk_slots(self) -> int:
        """Slots of one chunk: the fewest, in whole blocks, whose bytes are a multiple of 2 MiB."""
        return self.rooms.chunk_slots

    @property
    def n_chunks(self) -> int:
        """Chunks of the slots' section; the last may be shorter."""
        return -(-self.n_slots_max // self.chunk_slots)

    def chunk(self, chunk: int) -> tuple[int, int]:
        """(offset, bytes) of a chunk in the file."""
        if not 0 <= chunk < self.n_chunks:
            raise IndexError(f"chunk {chunk}: the arena has {self.n_chunks}")
        first = chunk * self.chunk_slots
        return self.slots_range(first, min(first + self.chunk_slots, self.n_slots_max))


def _sizes(counts: dict[str, int], rooms: Rooms) -> dict[str, int]:
    """Bytes of each section, without padding."""
    n_keys = counts["n_layers"] * counts["n_experts"]
    return {
        "identity": PAGE_BYTES,
        "epochs": N_EPOCH_WORDS * 8,
        "tier": n_keys,
        "table_lock": 64,
        "table": n_keys * 4,
        "headers": counts["n_slots_max"] * HEADER.itemsize,
        "policy": POLICY_GLOBAL_BYTES + n_keys * POLICY_KEY_BYTES,
        "verified": _up(n_keys, 64) // 8,
        "counters": N_COUNTERS * 8,
        "pieces": counts["n_layers"] * PIECES_LAYER_BYTES,
        "ring": counts["ring_rows"] * counts["row_bytes"],
        "slots": rooms.end(counts["n_slots_max"]),
    }


def _places(sizes: dict[str, int]) -> tuple[tuple[int, ...], int]:
    """(offset of each section, bytes of the file)."""
    alignment = dict.fromkeys(SECTIONS, 64)
    alignment.update(dict.fromkeys(("epochs", "table_lock", "ring"), PAGE_BYTES))
    alignment["slots"] = HUGE_BYTES if sizes["slots"] >= HUGE_FROM_BYTES else PAGE_BYTES
    offsets = []
    end = 0
    for name in SECTIONS:
        offset = _up(end, alignment[name])
        offsets.append(offset)
        end = offset + sizes[name]
    return tuple(offsets), _up(end, alignment["slots"])


def _check_counts(counts: dict[str, int]) -> None:
    for name, value in counts.items():
        low, high = LIMITS[name]
        if not low <= value <= high:
            raise ConfigError(f"arena layout: {name} is {value}, wanted {low} to {high}")
    if counts["slot_bytes"] % PAGE_BYTES:
        raise ConfigError(
            f"arena layout: slot_bytes {counts['slot_bytes']} is no multiple of {PAGE_BYTES}"
        )


def _check_rooms(rooms: Rooms, slot_bytes: int) -> None:
    sizes = rooms.sizes
    is_ordered = list(sizes) == sorted(set(sizes), reverse=True)
    if (
        not 1 <= len(sizes) <= MOST_ROOMS
        or len(sizes) != len(rooms.n_layers)
        or not is_ordered
        or sizes[0] != slot_bytes
        or sizes[-1] < PAGE_BYTES
        or any(size % PAGE_BYTES for size in sizes)
        or not all(1 <= count <= LIMITS["n_layers"][1] for count in rooms.n_layers)
        or not 0 <= rooms.n_common <= LIMITS["n_slots_max"][1]
        or rooms.n_common % len(rooms.block)
    ):
        raise ConfigError(
            f"arena layout: slots of {list(sizes)} bytes for {list(rooms.n_layers)} layers behind "
            f"{rooms.n_common} common ones, wanted sizes that descend from {slot_bytes}"
        )


def _check_pieces(offsets: tuple[int, ...], sizes: tuple[int, ...], slot_bytes: int) -> None:
    if len(offsets) != len(PIECES) or len(sizes) != len(PIECES):
        raise ConfigError(
            f"arena layout: {len(offsets)} piece offsets and {len(sizes)} sizes, "
            f"wanted {len(PIECES)} of each"
        )
    end = 0
    for name, offset, size in zip(PIECES, offsets, sizes, strict=True):
        if offset < end or size < 0 or offset % PIECE_ALIGNMENT or offset + size > slot_bytes:
            raise ConfigError(
                f"arena layout: piece {name} at {offset} with {size} bytes, wanted a multiple of "
                f"{PIECE_ALIGNMENT} from {end} on, ending by {slot_bytes}"
            )
        end = offset + size
