"""How large the arena is and how it is laid out, from the settings and the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from protocol.arena.fds import check_arena
from protocol.arena.layout import PIECES, ArenaLayout, Rooms
from protocol.errors import ProtocolError
from protocol.files.checkpoint import Checkpoint
from protocol.files.slice_map import SlotImage
from protocol.host_memory import host_memory

from .budget import Budget, before_slots, common_slots, minimum_slots, plan_arena, slot_budget
from .populate import available_bytes

MIN_RING_ROWS = 1024
MAX_RING_ROWS = 1 << 20
BY_MAX = "that is the --arena-max it was started with"
BY_SIZE = "that is the --arena it was started with; a start with --arena-max allows more"
BY_MEMORY = (
    "that is half of this machine's memory, or what was available of it at the start, since no "
    "--arena was given; a start with --arena-max allows more"
)
BY_FORMER = "that is what the arena of the last daemon, which was taken over, has room for"
RING_SHARE = 64  # ring and row cache take a 64th of what a minimal arena leaves of the largest size


@dataclass(frozen=True, slots=True)
class PlannedArena:
    """What the settings ask for."""

    layout: ArenaLayout
    n_slots: int
    n_bytes: int  # as populated
    budget: Budget
    max_bytes: int  # the most that a resize may give it
    max_from: str  # where that comes from, for the refusal
    n_slots_set: int  # what the settings give; another n_slots is a resize's, which outlives them
    pieces: NDArray[np.uint64]  # [n_layers, 2, 6], zeros for layers like the layout's
    layer_rooms: tuple[int, ...]  # the room of each layer's experts


def plan(
    checkpoint: Checkpoint, *, size_bytes: int, max_bytes: int, top_k_batch: int
) -> PlannedArena:
    """Return layout and slots for a size; 0: room for all experts, at most half of the memory.

    Raises ConfigError with each addend of the minimum where the size is too small.
    """
    n_keys = checkpoint.config.n_keys
    images = [layout.image for layout in checkpoint.slice_map.layouts]
    rooms = Rooms.of([image.slot_bytes for image in images], common_slots(top_k_batch))
    row_bytes = max((table.row_bytes for table in checkpoint.engram_tables), default=0)

    def layout_of(n_slots: int, ring_rows: int) -> ArenaLayout:
        image = checkpoint.slice_map.image
        return ArenaLayout.plan(
            n_layers=checkpoint.config.n_layers,
            n_experts=checkpoint.config.n_experts,
            n_slots_max=n_slots,
            slot_bytes=image.slot_bytes,
            row_bytes=row_bytes,
            ring_rows=ring_rows,
            piece_offsets=image.piece_offsets,
            piece_bytes=image.piece_bytes,
            rooms=rooms,
        )

    def bytes_of(n_slots: int, ring_rows: int) -> int:
        return layout_of(max(n_slots, 1), ring_rows).populated_bytes(n_slots)

    max_from = BY_MAX if max_bytes else BY_SIZE if size_bytes else BY_MEMORY
    least = bytes_of(minimum_slots(top_k_batch).n_slots, MIN_RING_ROWS if row_bytes else 0)
    size_bytes = size_bytes or max(least, _automatic_size())
    max_bytes = max(max_bytes, size_bytes)
    ring_rows = _ring_rows(size_bytes - least, max_bytes - least, row_bytes)
    largest = plan_arena(
        max_bytes,
        top_k_batch=top_k_batch,
        n_keys=n_keys,
        bytes_of=lambda n_slots: bytes_of(n_slots, ring_rows),
        beside=lambda n_slots: before_slots(layout_of(n_slots, ring_rows)),
    )
    layout = layout_of(largest.n_slots, ring_rows)
    planned = plan_arena(
        size_bytes,
        top_k_batch=top_k_batch,
        n_keys=n_keys,
        bytes_of=layout.populated_bytes,
        beside=lambda _: before_slots(layout),
    )
    return PlannedArena(
        layout=layout,
        n_slots=planned.n_slots,
        n_bytes=planned.n_bytes,
        budget=slot_budget(planned.n_slots, top_k_batch, rooms),
        max_bytes=max_bytes,
        max_from=max_from,
        n_slots_set=planned.n_slots,
        pieces=_pieces(images, checkpoint.slice_map.image),
        layer_rooms=tuple(rooms.room_for(image.slot_bytes) for image in images),
    )


def _pieces(images: Sequence[SlotImage], usual: SlotImage) -> NDArray[np.uint64]:
    """Offsets and bytes of each layer's pieces, zeros where they are the usual ones."""
    pieces = np.zeros((len(images), 2, len(PIECES)), np.uint64)
    for layer, image in enumerate(images):
        if image != usual:
            pieces[layer] = image.piece_offsets, image.piece_bytes
    return pieces


def _ring_rows(surplus_bytes: int, max_surplus_bytes: int, row_bytes: int) -> int:
    """Rows of the ring: by the largest size, so that a resized arena keeps its layout."""
    if row_bytes == 0:
        return 0
    wanted = max(0, max_surplus_bytes) // RING_SHARE // row_bytes
    possible = max(0, surplus_bytes) // 2 // row_bytes
    return min(MAX_RING_ROWS, MIN_RING_ROWS + min(wanted, possible))


def _automatic_size() -> int:
    """Half of our memory (a control group's limit counts), or what is available where less."""
    half = (
        host_memory().own_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    ) // 2
    return min(half, available_bytes() or half)


def keep_size(
    planned: PlannedArena, passed: int, fingerprint: bytes, top_k_batch: int, *, is_given: bool
) -> PlannedArena:
    """Return the plan of the arena passed on, where it is of our model and its size is to stay.

    A size that nobody gave was chosen once and stays; one that the settings give gives way to that
    of a resize, as long as the settings are what they were. Any other difference leaves `planned`
    as it is.
    """
    try:
        identity = check_arena(passed)
    except (ProtocolError, OSError):
        return planned
    ours, theirs = planned.layout, identity.layout
    budget = slot_budget(identity.n_slots, top_k_batch, theirs.rooms)
    is_same_model = (
        identity.fingerprint == fingerprint
        and theirs.piece_offsets == ours.piece_offsets
        and theirs.piece_bytes == ours.piece_bytes
        and (theirs.rooms, theirs.row_bytes) == (ours.rooms, ours.row_bytes)
    )
    if not is_same_model or budget.needed > identity.n_slots:
        return planned
    if is_given and (theirs != ours or identity.n_slots_set != planned.n_slots):
        return planned
    room = theirs.populated_bytes(theirs.n_slots_max)
    return replace(
        planned,
        layout=theirs,
        n_slots=identity.n_slots,
        n_bytes=theirs.populated_bytes(identity.n_slots),
        budget=budget,
        max_bytes=max(planned.max_bytes, room),
        max_from=BY_FORMER if room > planned.max_bytes else planned.max_from,
        n_slots_set=planned.n_slots if is_given else identity.n_slots_set,
    )
