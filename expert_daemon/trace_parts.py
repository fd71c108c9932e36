"""The parts of a routing trace on disk: FILE, and FILE.1, FILE.2, ... beside it.

Each header has the part's number, raised with each rotation: names say where to look, numbers in
which order parts were written and whether one is missing. Headers are read and checked before
anything else of a file is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from protocol.errors import ConfigError
from protocol.files.plain_file import open_plain, read_first

from .routing_trace import TraceShape
from .trace_format import HEADER_BYTES, Found, decode_blocks, decode_header

MOST_PART_BYTES = 1 << 30  # of one part; a larger file is not read


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a trace, its header read."""

    path: Path
    shape: TraceShape
    number: int
    header: bytes


def older_path(path: Path, number: int) -> Path:
    """The name of an older part; the part before `path` is 1."""
    return path.with_name(f"{path.name}.{number}")


def older_paths(path: Path) -> list[Path]:
    """The older parts that there are, by name, the newest first. Raises ConfigError."""
    name = re.compile(re.escape(path.name) + r"\.([1-9][0-9]{0,8})")
    try:
        found = [name.fullmatch(one.name) for one in path.parent.iterdir()]
    except OSError as error:
        raise ConfigError(f"{path.parent}: {error.strerror}") from error
    return [older_path(path, number) for number in sorted(int(m[1]) for m in found if m)]


def trace_parts(path: Path) -> list[Path]:
    """The files of a trace, the oldest first by name, `path` itself last."""
    return [*reversed(older_paths(path)), path]


def read_head(path: Path) -> Part:
    """Read a part's header. Raises ConfigError where it is none."""
    descriptor = open_plain(path, where=str(path))
    try:
        return _head(descriptor, path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    finally:
        os.close(descriptor)


def _head(descriptor: int, path: Path) -> Part:
    header = read_first(descriptor, HEADER_BYTES)
    shape, number = decode_header(header, str(path))
    return Part(path, shape, number, header)


def read_blocks(part: Part) -> Found:
    """Read a part's steps. Raises ConfigError, also where it is larger than a part may be."""
    path = part.path
    descriptor = open_plain(path, where=str(path))
    try:
        if _head(descriptor, path) != part:
            raise ConfigError(f"{path}: it was replaced as it was read, read it again")
        n_bytes = os.fstat(descriptor).st_size
        if n_bytes > MOST_PART_BYTES:
            raise ConfigError(f"{path}: {n_bytes} bytes, a part has {MOST_PART_BYTES} at most")
        data = read_first(descriptor, n_bytes)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    finally:
        os.close(descriptor)
    return decode_blocks(data, part.shape)


def next_number(path: Path) -> int:
    """The number of a part that begins anew: behind all older ones. Raises ConfigError."""
    return 1 + max((part.number for part in _readable(older_paths(path))[0]), default=-1)


def find_parts(path: Path) -> tuple[list[Part], list[str]]:
    """Return the parts that belong together, the oldest first, and what was left out, a line each.

    Raises ConfigError where `path` is no trace, or is not there and has no older part. A file that
    is no trace is left out, one that stands twice too, and all that is older than another model.
    """
    older = older_paths(path)
    if older and not path.exists():  # its writer died as it made a new one
        parts, notes = _readable(older)
        notes.insert(0, f"{path}: no such file, only its older parts")
    else:
        newest = read_head(path)
        parts, notes = _readable(older)
        parts.insert(0, newest)
    if not parts:
        raise ConfigError("; ".join(notes))
    # Stable: of two with one number, that with the newer name stays in front.
    parts = _of_one_model(_once(sorted(parts, key=lambda part: -part.number), notes), notes)
    return parts[::-1], notes + _gaps(path, parts[::-1])


def _readable(paths: Sequence[Path]) -> tuple[list[Part], list[str]]:
    parts, notes = [], []
    for path in paths:
        try:
            parts.append(read_head(path))
        except ConfigError as error:
            notes.append(f"{error}: left out")
    return parts, notes


def _once(parts: Sequence[Part], notes: list[str]) -> list[Part]:
    first: dict[bytes, Part] = {}
    for part in parts:
        same = first.setdefault(part.header, part)
        if same is not part:
            notes += [f"{part.path}: the same part as {same.path}: left out"]
    return list(first.values())


def _of_one_model(parts: list[Part], notes: list[str]) -> list[Part]:
    for place, part in enumerate(parts):
        if part.shape != parts[0].shape:
            notes.append(f"{part.path}: of another model: left out, and what is older")
            return parts[:place]
    return parts


def _gaps(path: Path, parts: Sequence[Part]) -> list[str]:
    notes = []
    for older, newer in pairwise(parts):
        n_missing = newer.number - older.number - 1
        if n_missing > 0:
            before, behind = older.path.name, newer.path.name
            notes.append(f"{path}: parts missing between {before} and {behind}: {n_missing}")
    return notes
