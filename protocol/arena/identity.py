"""The identity page: which layout, which model, which arena, and whose it is now.

Bytes 0 to 535 are written once and carry a checksum; the words from 1024 on change while the arena
lives and are advice for whoever attaches next. PROTOCOL.md gives both byte by byte.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from protocol.errors import ConfigError, ProtocolError

from .plan import PIECES, SECTIONS, ArenaLayout
from .rooms import MOST_ROOMS, PAGE_BYTES, Rooms

MAGIC = b"HRARENA\n"
LAYOUT_VERSION = (2, 0)  # (major, minor); another major is refused

_FIXED = struct.Struct(
    f"<8sIIQQ16s16s6Q{len(PIECES)}Q{len(PIECES)}Q{len(SECTIONS)}Q{len(SECTIONS)}Q"
    f"Q{MOST_ROOMS}Q{MOST_ROOMS}Q"
)
_CHECKSUM_AT = 24
_WORDS = struct.Struct("<QQIIQQ")
_WORDS_AT = 1024


@dataclass(frozen=True, slots=True)
class Identity:
    """What the identity page says."""

    layout: ArenaLayout
    arena_id: bytes  # 16 random bytes, new with each arena
    fingerprint: bytes  # 16 bytes, of the model
    daemon_generation: int  # raised at each start of a daemon
    n_slots: int  # slots that may be used now
    engine_pid: int = 0  # 0: no engine
    engine_started: int = 0  # start time of that process, in clock ticks since boot
    clean: bool = False  # the last daemon closed the arena in order
    n_slots_set: int = 0  # what the settings gave when n_slots was last set by them; 0: not told
    layout_version: tuple[int, int] = LAYOUT_VERSION


def write_identity(memory: Any, identity: Identity) -> None:
    """Write the whole page into a writable arena."""
    layout = identity.layout
    if len(identity.arena_id) != 16 or len(identity.fingerprint) != 16:
        raise ConfigError(
            f"identity page: arena_id of {len(identity.arena_id)} and fingerprint of "
            f"{len(identity.fingerprint)} bytes, wanted 16 each"
        )
    page = bytearray(PAGE_BYTES)
    _FIXED.pack_into(
        page,
        0,
        MAGIC,
        *identity.layout_version,
        layout.n_bytes,
        0,
        identity.arena_id,
        identity.fingerprint,
        layout.n_layers,
        layout.n_experts,
        layout.n_slots_max,
        layout.slot_bytes,
        layout.row_bytes,
        layout.ring_rows,
        *layout.piece_offsets,
        *layout.piece_bytes,
        *layout.offsets,
        *layout.sizes,
        layout.rooms.n_common,
        *_filled(layout.rooms.sizes),
        *_filled(layout.rooms.n_layers),
    )
    struct.pack_into("<Q", page, _CHECKSUM_AT, _checksum(page))
    _pack_words(page, identity)
    memoryview(memory).cast("B")[:PAGE_BYTES] = page


def update_identity(memory: Any, **words: Any) -> Identity:
    """Change the words that may change: daemon_generation, n_slots*, engine_*, clean."""
    identity = replace(read_identity(memory), **words)
    view = memoryview(memory).cast("B")
    _pack_words(view, identity)
    return identity


def read_identity(memory: Any) -> Identity:
    """What the page says; raises ProtocolError where it is not an arena of this layout."""
    page = bytes(memoryview(memory).cast("B")[:PAGE_BYTES])
    if len(page) < PAGE_BYTES or page[: len(MAGIC)] != MAGIC:
        raise ProtocolError(
            f"identity page: found {page[: len(MAGIC)]!r}, wanted an arena ({MAGIC!r})"
        )
    major, minor = struct.unpack_from("<II", page, len(MAGIC))
    if major != LAYOUT_VERSION[0]:
        raise ProtocolError(
            f"identity page: the arena has layout {major}.{minor}, "
            f"this program has {LAYOUT_VERSION[0]}.{LAYOUT_VERSION[1]}"
        )
    _, _, _, n_bytes, checksum, arena_id, fingerprint, *numbers = _FIXED.unpack_from(page)
    if checksum != _checksum(page):
        raise ProtocolError(
            f"identity page: checksum is {checksum:016x}, its bytes give {_checksum(page):016x}"
        )
    layout = _planned(numbers, n_bytes)
    words = _WORDS.unpack_from(page, _WORDS_AT)
    generation, n_slots, engine_pid, clean, engine_started, n_slots_set = words
    if n_slots > layout.n_slots_max:
        raise ProtocolError(
            f"identity page: {n_slots} slots in use, the arena has room for {layout.n_slots_max}"
        )
    return Identity(
        layout=layout,
        arena_id=arena_id,
        fingerprint=fingerprint,
        daemon_generation=generation,
        n_slots=n_slots,
        engine_pid=engine_pid,
        engine_started=engine_started,
        clean=bool(clean),
        n_slots_set=n_slots_set,
        layout_version=(major, minor),
    )


def _planned(numbers: list[int], n_bytes: int) -> ArenaLayout:
    """The layout planned from the page's counts, which must agree with the page's offsets."""
    n_pieces, n_sections = len(PIECES), len(SECTIONS)
    counts, rest = numbers[:6], numbers[6:]
    places = rest[2 * n_pieces : 2 * n_pieces + 2 * n_sections]
    n_common, *rooms = rest[2 * n_pieces + 2 * n_sections :]
    sizes, layers = rooms[:MOST_ROOMS], rooms[MOST_ROOMS:]
    n_rooms = sizes.index(0) if 0 in sizes else MOST_ROOMS
    try:
        layout = ArenaLayout.plan(
            n_layers=counts[0],
            n_experts=counts[1],
            n_slots_max=counts[2],
            slot_bytes=counts[3],
            row_bytes=counts[4],
            ring_rows=counts[5],
            piece_offsets=tuple(rest[:n_pieces]),
            piece_bytes=tuple(rest[n_pieces : 2 * n_pieces]),
            rooms=Rooms(tuple(sizes[:n_rooms]), tuple(layers[:n_rooms]), n_common),
        )
    except ConfigError as error:
        raise ProtocolError(f"identity page: {error}") from None
    found = (*places, n_bytes)
    wanted = (*layout.offsets, *layout.sizes, layout.n_bytes)
    for place, (there, here) in enumerate(zip(found, wanted, strict=True)):
        if there != here:
            name = (*SECTIONS, *(f"{name} size" for name in SECTIONS), "n_bytes")[place]
            raise ProtocolError(
                f"identity page: the arena has {name} {there}, this program has {here}"
            )
    assert len(wanted) == 2 * n_sections + 1
    return layout


def _filled(numbers: tuple[int, ...]) -> tuple[int, ...]:
    return (*numbers, *(0,) * (MOST_ROOMS - len(numbers)))


def _pack_words(page: Any, identity: Identity) -> None:
    _WORDS.pack_into(
        page,
        _WORDS_AT,
        identity.daemon_generation,
        identity.n_slots,
        identity.engine_pid,
        int(identity.clean),
        identity.engine_started,
        identity.n_slots_set,
    )


def _checksum(page: bytes | bytearray) -> int:
    """xxh3_64 of the fixed part, the checksum's own bytes left out."""
    hasher = xxhash.xxh3_64(page[:_CHECKSUM_AT])
    hasher.update(page[_CHECKSUM_AT + 8 : _FIXED.size])
    return hasher.intdigest()
