"""How far the streams of a prompt's chunk read ahead: of what is computed, and of its layer."""

from __future__ import annotations

STREAM_WINDOW = 16  # experts that are read ahead of the one that is computed


def n_foreseen(n_picked: float, n_experts: int) -> int:
    """Return how many experts of the next layer are read before its router has run.

    A chunk that picked three quarters of a layer's experts, or more, picks most of the next one's.
    """
    return STREAM_WINDOW if 4 * n_picked >= 3 * n_experts else 0
