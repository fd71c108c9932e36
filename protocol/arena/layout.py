"""The arena's layout: its plan, its identity page and the views of its sections.

What other rooms import stands here; PROTOCOL.md gives the layout byte by byte.
"""

from .identity import LAYOUT_VERSION, Identity, read_identity, update_identity, write_identity
from .plan import (
    HEADER,
    N_COUNTERS,
    N_EPOCH_WORDS,
    PIECE_ALIGNMENT,
    PIECES,
    SECTIONS,
    ArenaLayout,
    SlotState,
)
from .rooms import HUGE_BYTES, PAGE_BYTES, Rooms
from .view import ArenaView

__all__ = [
    "HEADER",
    "HUGE_BYTES",
    "LAYOUT_VERSION",
    "N_COUNTERS",
    "N_EPOCH_WORDS",
    "PAGE_BYTES",
    "PIECES",
    "PIECE_ALIGNMENT",
    "SECTIONS",
    "ArenaLayout",
    "ArenaView",
    "Identity",
    "Rooms",
    "SlotState",
    "read_identity",
    "update_identity",
    "write_identity",
]
