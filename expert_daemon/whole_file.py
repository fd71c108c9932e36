"""Files replaced whole or not at all, and what a writer that was killed has left of one.

The new content is written beside the file, under a name of its own and a lock that ends with the
process: what can be locked is nobody's any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path
from stat import S_ISREG

from .log import log

_SUFFIX = ".new"


def replace_file(path: Path, content: bytes) -> None:
    """Give `path` this content, durably: after a crash it is the old or the new one, whole."""
    descriptor, beside = _open_beside(path)
    # The descriptor holds the lock until the file has its name.
    with open(descriptor, "wb") as file:  # noqa: PTH123
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            beside.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _open_beside(path: Path) -> tuple[int, Path]:
    """Return a new, locked file and its name."""
    while True:
        descriptor, name = tempfile.mkstemp(_SUFFIX, f"{path.name}.", path.parent)
        with contextlib.suppress(OSError):  # without locks there is nobody who removes leftovers
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor, Path(name)
        os.close(descriptor)  # another process took it for a leftover before it was locked


def remove_leftovers(directory: Path, name: str = "*") -> None:
    """Remove what writers of the file `name`, or of any, left in `directory` when they died."""
    found: list[Path] = []
    with contextlib.suppress(OSError):  # whoever writes here next will say so
        found += directory.glob(f"{name}.*{_SUFFIX}")
    for path in found:
        with contextlib.suppress(OSError):  # it is gone by now, in use, or no file of ours
            _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(descriptor)
        if S_ISREG(found.st_mode) and found.st_nlink:  # else its writer failed just now
            path.unlink()
            log(f"{path}: removed, whoever wrote it was killed")
    finally:
        os.close(descriptor)
