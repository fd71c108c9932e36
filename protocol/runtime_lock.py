"""The runtime directory, and the lock that makes a service the only one of its kind in it.

Invariants: the lock is taken before any socket is bound and held until the process has gone. Its
file is never unlinked: a second file of the same name would be a second lock. (A second bind on a
live ipc path succeeds silently and steals the clients.)
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from .errors import ConfigError


def prepare_directory(path: Path) -> None:
    """Create `path` with mode 0700, or check that it is ours and that nobody else may write in it.

    Raises ConfigError.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be made a directory: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigError(f"{path}: is not a directory of user {os.geteuid()}")
    if found.st_mode & 0o022:
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(f"{path}: others may write there (mode {mode:04o}); wanted 0700")


class RuntimeLock:
    """An exclusive lock on a file, held until `close` or the end of the process."""

    def __init__(self, path: Path, what: str = "expert daemon") -> None:
        """Take the lock. Raises ConfigError naming the holder's process where another has it."""
        self._path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(self._descriptor)
            raise ConfigError(
                f"{path}: another {what} (pid {holder or 'unknown'}) runs in {path.parent}"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, b"%d\n" % os.getpid(), 0)

    def close(self) -> None:
        """Give the lock back; the file stays."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
