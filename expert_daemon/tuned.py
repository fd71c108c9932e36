"""How experts are read: what was asked for, else what was measured here, else what is safe.

`headrace tune` measures and stores; the store holds one entry a machine and file system, so that
a state directory may be shared or moved.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from protocol.files.checkpoint import Checkpoint
from protocol.files.safetensors_index import Shard

from .file_system import FileSystem, file_system_of
from .log import log
from .read_plan import CUT_BYTES, MAX_PARTS, ReadShape
from .whole_file import remove_leftovers, replace_file

NAME = "tuned.json"
MOST_THREADS = 64
SMALLEST_BYTES = 1 << 20  # of an expert: smaller ones say nothing about larger ones
MOST_RATIO = 4  # between the experts measured and those to be read
_MACHINE_ID = Path("/etc/machine-id")


@dataclass(frozen=True, slots=True)
class Reading:
    """How experts are read."""

    mode: str = "direct"  # or "buffered"
    threads: int = 8
    cut_bytes: int = CUT_BYTES  # parts are multiples of it
    max_parts: int = MAX_PARTS  # of one expert

    @property
    def shape(self) -> ReadShape:
        """How an expert is cut."""
        return ReadShape(self.cut_bytes, self.max_parts)

    @property
    def text(self) -> str:
        """In words."""
        return (
            f"{self.mode} reads by {self.threads} threads, an expert in up to {self.max_parts} "
            f"parts of whole {self.cut_bytes / (1 << 20):g} MiB"
        )


SAFE = Reading()
SAFE_ON_A_NETWORK = Reading(mode="buffered")


@dataclass(frozen=True, slots=True)
class Choice:
    """A Reading and where it comes from."""

    reading: Reading
    why: str


def fits_in_memory(shards: Sequence[Shard], available_bytes: int) -> bool:
    """Whether the page cache could hold all shards beside an arena as large."""
    return 2 * sum(shard.n_bytes for shard in shards) <= available_bytes


@dataclass(frozen=True, slots=True)
class Material:
    """What is to be read: what was measured for another kind of model is void."""

    on: FileSystem
    slot_bytes: int  # of an expert
    fits: bool  # in memory, see fits_in_memory: else the page cache is no choice


def material_of(checkpoint: Checkpoint, available_bytes: int) -> Material:
    """Return what a checkpoint's experts are to a reader. Raises OSError."""
    shards = checkpoint.shards
    return Material(
        file_system_of(shards[0].path),
        checkpoint.slice_map.image.slot_bytes,
        fits_in_memory(shards, available_bytes),
    )


def choose_reading(state_dir: Path, what: Material, *, mode: str = "", threads: int = 0) -> Choice:
    """Return how to read `what`; `mode` and `threads` win where they are given."""
    on = what.on
    reading, why = load_tuned(state_dir, what), "as measured by headrace tune"
    if reading is None and on.is_network:
        reading, why = SAFE_ON_A_NETWORK, f"by default on {on.kind}"
    elif reading is None:
        reading, why = SAFE, "by default; headrace tune measures what is best here"
    given = replace(reading, mode=mode or reading.mode, threads=threads or reading.threads)
    return Choice(given, why if given == reading else "as asked for")


def load_tuned(state_dir: Path, what: Material) -> Reading | None:
    """Return what was measured here for experts of about this size, None where nothing was."""
    entry = _entries(state_dir / NAME).get(_key(what.on))
    try:
        if entry is None:
            return None
        slot_bytes = int(entry["slot_bytes"])
        if max(slot_bytes, what.slot_bytes) > MOST_RATIO * min(slot_bytes, what.slot_bytes):
            return None
        direct = _checked(entry["direct"])
        buffered = entry["buffered"]
        return direct if buffered is None or not what.fits else _checked(buffered)
    except (TypeError, ValueError, KeyError) as error:
        log(f"{state_dir / NAME}: not used: {error!r}")
        return None


def store_tuned(
    state_dir: Path, what: Material, *, direct: Reading, buffered: Reading | None, figures: Any
) -> Path:
    """Keep what was measured, beside what stands there; returns the file. Raises OSError."""
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = state_dir / NAME
    entry = {
        "slot_bytes": what.slot_bytes,
        "direct": asdict(direct),
        "buffered": None if buffered is None else asdict(buffered),
        "figures": figures,
    }
    entries = _entries(path) | {_key(what.on): entry}
    remove_leftovers(state_dir, NAME)
    replace_file(path, json.dumps(entries, indent=2, sort_keys=True).encode() + b"\n")
    return path


def machine_name() -> str:
    """Return what tells this machine from others."""
    try:
        found = _MACHINE_ID.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        found = ""
    return found or socket.gethostname()


def _key(on: FileSystem) -> str:
    return f"{machine_name()} {on.name}"


def _entries(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log(f"{path}: not used: {error}")
        return {}
    return found if isinstance(found, dict) else {}


def _checked(entry: dict[str, Any]) -> Reading:
    reading = Reading(
        str(entry["mode"]),
        int(entry["threads"]),
        int(entry["cut_bytes"]),
        int(entry["max_parts"]),
    )
    fine = (
        reading.mode in ("direct", "buffered")
        and 1 <= reading.threads <= MOST_THREADS
        and 4096 <= reading.cut_bytes <= 1 << 26
        and reading.cut_bytes % 4096 == 0
        and 1 <= reading.max_parts <= 64
    )
    if not fine:
        raise ValueError(f"{reading} is out of range")
    return reading
