"""A file that is being written as `NAME.part`: O_DIRECT where that works, in any order, resumable.

Invariants: the final name exists only with every byte in it and on the drive. Bytes in a part file
mean nothing by themselves; the journal says which were written, and their hashes are compared.
Usable by many threads.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from protocol.errors import ConfigError

ALIGN = 4096
MODE = 0o644

Bytes = npt.NDArray[np.uint8]

_libc = ctypes.CDLL(None, use_errno=True)


class PartFile:
    """`n_bytes` of room under a temporary name beside `path`."""

    def __init__(self, path: Path, n_bytes: int) -> None:
        """Create or take up the part file. Raises ConfigError where there is no room."""
        self.path = path
        self.n_bytes = n_bytes
        self._part = part_path(path)
        if path.exists() and not self._part.exists():
            path.rename(self._part)  # finished, but not noted as such
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._buffered = os.open(self._part, flags, MODE)
        self._direct = self._open_direct()
        self._make_room()

    def write(self, views: list[Bytes], offset: int) -> None:
        """Write `views` one after the other from `offset` on."""
        descriptor = self._descriptor_for(views, offset)
        n_left = sum(len(view) for view in views)
        rest = views
        while n_left:
            try:
                done = os.pwritev(descriptor, [view.data for view in rest], offset)
            except OSError as error:
                if error.errno == errno.EINVAL and descriptor != self._buffered:
                    descriptor = self._buffered
                    continue
                raise write_error(self._part, error) from error
            n_left -= done
            offset += done
            rest = skip_bytes(rest, done)

    def read(self, views: list[Bytes], offset: int) -> bool:
        """Fill `views` from `offset` on; False where the bytes cannot be read."""
        descriptor = self._descriptor_for(views, offset)
        n_left = sum(len(view) for view in views)
        rest = views
        while n_left:
            try:
                done = os.preadv(descriptor, [view.data for view in rest], offset)
            except OSError:
                return False
            if done == 0:
                return False
            n_left -= done
            offset += done
            rest = skip_bytes(rest, done)
        return True

    def _descriptor_for(self, views: list[Bytes], offset: int) -> int:
        numbers = [offset]
        for view in views:
            numbers += [len(view), int(view.__array_interface__["data"][0])]
        is_aligned = not any(number % ALIGN for number in numbers)
        return self._direct if self._direct >= 0 and is_aligned else self._buffered

    def sync(self) -> None:
        """Have every byte on the drive."""
        try:
            os.fsync(self._buffered)
        except OSError as error:
            raise write_error(self._part, error) from error

    def publish(self) -> None:
        """Give the file its final name; call `sync` before."""
        self.close()
        self._part.rename(self.path)
        sync_directory(self.path.parent)

    def close(self) -> None:
        """Close the descriptors; the part file stays."""
        for descriptor in (self._direct, self._buffered):
            if descriptor >= 0:
                os.close(descriptor)
        self._direct = self._buffered = -1

    def _open_direct(self) -> int:
        try:
            descriptor = os.open(self._part, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            return -1
        from expert_daemon.direct_io import direct_alignment

        if direct_alignment(descriptor) != ALIGN:
            os.close(descriptor)
            return -1
        return descriptor

    def _make_room(self) -> None:
        """Set the size and allocate the blocks, so that a full drive is found out now."""
        os.ftruncate(self._buffered, self.n_bytes)
        if self.n_bytes == 0:
            return
        status = _libc.fallocate64(
            self._buffered, 0, ctypes.c_int64(0), ctypes.c_int64(self.n_bytes)
        )
        if status != 0 and ctypes.get_errno() in {errno.ENOSPC, errno.EDQUOT}:
            number = ctypes.get_errno()
            raise write_error(self._part, OSError(number, os.strerror(number)))


def part_path(path: Path) -> Path:
    """Return the temporary name of a file that is being written."""
    return path.with_name(path.name + ".part")


def skip_bytes(views: list[Bytes], n_bytes: int) -> list[Bytes]:
    """Return what is left of `views` after their first `n_bytes`."""
    rest: list[Bytes] = []
    for view in views:
        if n_bytes < len(view):
            rest.append(view[n_bytes:])
        n_bytes = max(0, n_bytes - len(view))
    return rest


def write_error(path: Path, error: OSError) -> ConfigError:
    """Return what a failed write means for the user."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return ConfigError(f"{path}: no room left; make room and run the same command again")
    return ConfigError(f"{path}: cannot be written: {error.strerror}")


def sync_directory(directory: Path) -> None:
    """Have a directory's entries on the drive."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file so that it is whole or not there; raises ConfigError."""
    temporary = path.with_name(path.name + ".new")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, MODE)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise write_error(path, error) from error
