"""Engram shards in the pack: the source's own files, linked, and closed to writers.

A hard link is the source's file under another name, and through a symbolic link one opens it too.
So that nobody who writes into the pack changes the source, the file loses its write permission, for
both names; where that cannot be done and the file could be written to, only --copy will do. (Root
is not held by permissions.)
"""

from __future__ import annotations

import os
from pathlib import Path

from protocol.errors import ConfigError

from .part_file import sync_directory, write_error

WRITE_BITS = 0o222


def link_shard(path: Path, directory: Path) -> str:
    """Link a shard into a directory; return "hard link" or "symbolic link".

    A link that is there already stays. Raises ConfigError.
    """
    check_link(path, directory)
    real, name = path.resolve(), directory / path.name
    if os.path.lexists(name):
        _close_to_writers(real)
        return "symbolic link" if name.is_symlink() else "hard link"
    _close_to_writers(real)
    try:
        how = _link(real, name)
        sync_directory(directory)
    except OSError as error:
        raise write_error(name, error) from error
    return how


def check_link(path: Path, directory: Path) -> None:
    """Raise ConfigError where `link_shard` would, as far as that shows without doing it."""
    real, name = path.resolve(), directory / path.name
    if os.path.lexists(name) and not (name.exists() and name.samefile(real)):
        raise ConfigError(f"{name}: is in the way of the link to {real}")
    status = real.stat()
    may_close = os.geteuid() in {0, status.st_uid}
    if status.st_mode & WRITE_BITS and not may_close and os.access(real, os.W_OK):
        raise _stays_writable(real, "it belongs to another user")


def would_link(path: Path, directory: Path) -> str:
    """Return which kind of link `link_shard` will most likely make."""
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    is_same = place.stat().st_dev == path.resolve().stat().st_dev
    return "hard link" if is_same else "symbolic link"


def _link(real: Path, name: Path) -> str:
    try:
        name.hardlink_to(real)
    except OSError:  # another file system, or one without hard links
        name.symlink_to(real)
        return "symbolic link"
    return "hard link"


def _close_to_writers(real: Path) -> None:
    mode = real.stat().st_mode
    if not mode & WRITE_BITS:
        return
    try:
        real.chmod(mode & 0o7777 & ~WRITE_BITS)
    except OSError as error:
        if os.access(real, os.W_OK):
            raise _stays_writable(real, str(error.strerror)) from None


def _stays_writable(real: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{real}: could be written through its link, and its write permission cannot be "
        f"taken away ({why}): use --copy"
    )
