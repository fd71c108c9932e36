"""Which block formats the matrices of one expert have, and how large they are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Sizes of one expert stored in GGUF blocks: rows of blocks, one after another."""

    hidden: int  # channels in and out
    width: int  # channels between
    gate: str  # names of block formats
    up: str
    down: str
