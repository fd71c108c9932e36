"""Plain files of ours, opened without waiting: a pipe, a device or a directory is refused.

Reads take what a file had when it was opened, so that none of them goes on without end.
"""

from __future__ import annotations

import errno
import os
import unicodedata
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from protocol.errors import ConfigError

MOST_PATH_BYTES = 4095


def check_path(path: str | Path, what: str = "path") -> None:
    """Raise ConfigError where a path cannot be one, or would not be one line of a log."""
    text = str(path)
    shown = repr(text[:100])
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        raise ConfigError(f"{what} {shown}: a path has no control characters, and is UTF-8")
    if len(text.encode()) > MOST_PATH_BYTES:
        raise ConfigError(f"{what} {shown}...: a path has at most {MOST_PATH_BYTES} bytes")


def open_plain(path: Path, flags: int = os.O_RDONLY, *, where: str) -> int:
    """Return a descriptor of a plain file; raises ConfigError for anything else.

    flags  as of os.open; with O_CREAT a file is made for its owner alone
    where  begins the message
    """
    check_path(path, where.removesuffix(str(path)).strip() or "path")
    try:
        # A device is not even opened: that alone starts a watchdog, or rewinds a tape.
        if path.exists():
            _check_mode(path.stat().st_mode, where)
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from error
    try:
        _check_mode(os.fstat(descriptor).st_mode, where)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_mode(mode: int, where: str) -> None:
    if S_ISDIR(mode):
        raise ConfigError(f"{where}: {os.strerror(errno.EISDIR)}")
    if not S_ISREG(mode):
        raise ConfigError(f"{where}: not a plain file")


def read_first(descriptor: int, n_bytes: int) -> bytes:
    """Return the first bytes of a file, fewer where it is shorter. Raises OSError."""
    parts = []
    place = 0
    while place < n_bytes:
        part = os.pread(descriptor, n_bytes - place, place)
        if not part:
            break
        parts.append(part)
        place += len(part)
    return b"".join(parts)
