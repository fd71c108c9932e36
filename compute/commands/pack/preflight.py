"""Refusals before any work: directories that overlap, are read-only, in use, or without room."""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from protocol.errors import ConfigError
from protocol.files.model_config import ModelConfig
from protocol.files.pack_manifest import is_pack
from protocol.sizes import format_size

from .outputs import PlannedFile
from .part_file import part_path
from .plan import PackOptions, PackPlan, experts_bytes

SPARE_BYTES = 64 << 20  # for journals, directories and what else stands beside the files
IGNORED_NAMES = frozenset({"lost+found"})


def check_places(options: PackOptions, config: ModelConfig | None) -> None:
    """Check the directories, and with a config roughly the room; needs nothing else of the source.

    Raises ConfigError naming the directory.
    """
    _check_distinct(options)
    for directory in _directories(options):
        _check_writable(directory)
    if is_pack(options.target):
        return
    _check_unused(options.target, "")
    for directory in (*options.stripes, *([options.mirror] if options.mirror else [])):
        if directory != options.target:
            _check_unused(directory, "experts-")
    if config is None:
        return
    record_places = options.stripes or (options.target,)
    share = experts_bytes(config, options) // (len(record_places) + (options.mirror is not None))
    needed: dict[Path, int] = defaultdict(int)
    for directory in (*record_places, *([options.mirror] if options.mirror else [])):
        needed[directory] += share
    _check_needed(needed)


def check_room(plan: PackPlan, done: Iterable[tuple[str, str]]) -> None:
    """Check that every filesystem has room for what is not there yet; raises ConfigError."""
    finished = set(done)
    needed: dict[Path, int] = defaultdict(int)
    for file in plan.planned_files():
        if (file.place, file.name) not in finished:
            directory = plan.directory(file.place)
            needed[directory] += max(0, file.n_bytes - _allocated(directory, file))
    _check_needed(needed)


def _check_needed(needed: dict[Path, int]) -> None:
    by_device: dict[int, list[Path]] = defaultdict(list)
    for directory in needed:
        by_device[_nearest(directory).stat().st_dev].append(directory)
    for directories in by_device.values():
        n_bytes = sum(needed[directory] for directory in directories)
        if n_bytes == 0:
            continue
        room = os.statvfs(_nearest(directories[0]))
        free = room.f_bavail * room.f_frsize
        if n_bytes + SPARE_BYTES > free:
            raise ConfigError(
                f"{directories[0]}: no room: {format_size(n_bytes)} ({n_bytes} bytes) to write, "
                f"{format_size(free)} free on its file system"
            )


def _check_distinct(options: PackOptions) -> None:
    for directory in _directories(options):
        _check_apart(directory, options.source)
    places = [path.resolve() for path in options.stripes]
    if len(set(places)) != len(places):
        raise ConfigError("--stripe: a directory stands there twice")
    if len(places) == 1:
        raise ConfigError("--stripe: wants two directories or more")
    if options.mirror is not None and options.mirror.resolve() in {
        *places,
        options.target.resolve(),
    }:
        raise ConfigError(f"--mirror: {options.mirror} already holds the first copy")


def _check_apart(directory: Path, source: Path) -> None:
    """Neither lies in the other, nor a file that the source links to in the directory."""
    place, real = directory.resolve(), source.resolve()
    if place == real:
        raise ConfigError(f"{directory}: is the source itself")
    if place.is_relative_to(real):
        raise ConfigError(f"{directory}: lies inside the source {source}; give one outside of it")
    if real.is_relative_to(place):
        raise ConfigError(f"{directory}: holds the source {source}; give one beside it")
    for path in source.iterdir() if source.is_dir() else ():
        if path.is_symlink() and path.resolve().is_relative_to(place):
            raise ConfigError(
                f"{directory}: holds {path.resolve()}, which {path} of the source links to; "
                "give a directory beside it"
            )


def _check_writable(directory: Path) -> None:
    place = _nearest(directory)
    status = place.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{place}: is not a directory")
    # A directory that nobody may write to was meant that way, even where we are root.
    is_read_only = (
        os.statvfs(place).f_flag & os.ST_RDONLY
        or not status.st_mode & 0o222
        or not os.access(place, os.W_OK | os.X_OK)
    )
    if is_read_only:
        raise ConfigError(f"{place}: is read-only, nothing can be written there")


def _check_unused(directory: Path, prefix: str) -> None:
    if not directory.is_dir():
        return
    for name in sorted(path.name for path in directory.iterdir()):
        if name.startswith(prefix) and name not in IGNORED_NAMES:
            raise ConfigError(
                f"{directory}: holds {name!r}, which is no part of a pack begun here; "
                "give an empty or a new directory"
            )


def _directories(options: PackOptions) -> list[Path]:
    return [options.target, *options.stripes, *([options.mirror] if options.mirror else [])]


def _nearest(directory: Path) -> Path:
    """Return the directory, or what exists above it."""
    path = directory.absolute()
    while not path.exists():
        path = path.parent
    return path


def _allocated(directory: Path, file: PlannedFile) -> int:
    """Return bytes that an earlier run has allocated already."""
    path = directory / file.name
    for candidate in (part_path(path), path):
        if candidate.is_file():
            return candidate.stat().st_blocks * 512
    return 0
