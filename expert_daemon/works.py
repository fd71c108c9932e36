"""What the server serves from, all of it made before the first client may come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .arena import Arena
from .arena_size import ArenaSize
from .lifetime import Lifetime
from .loading import ExpertLoading
from .metrics import Counters
from .range_reader import RangeReader
from .reader import ExpertReader
from .reader_threads import ReaderThreads
from .rows import EngramRows
from .trace import Tracing

Value = int | float | str


@dataclass(frozen=True, slots=True)
class Works:
    """The arena, what reads into it, and what was set."""

    arena: Arena
    size: ArenaSize
    loading: ExpertLoading
    reader: ExpertReader
    threads: ReaderThreads
    ranges: RangeReader
    rows: EngramRows
    tracing: Tracing
    counters: Counters
    lifetime: Lifetime
    top_k_batch: int
    descriptor_path: Path
    settings: Mapping[str, Value]  # for Stats
