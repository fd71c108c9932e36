"""What O_DIRECT asks of a file: its alignment, and memory that satisfies it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os

import numpy as np
import numpy.typing as npt

from protocol.arena.rooms import HUGE_BYTES

MIN_ALIGNMENT = 4096
_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000
_STATX_BYTES = 256
_MEMORY_ALIGN_AT = 152  # struct statx: stx_dio_mem_align u32, stx_dio_offset_align u32

_libc = ctypes.CDLL(None, use_errno=True)


def direct_alignment(descriptor: int) -> int:
    """Return the bytes to which O_DIRECT reads of an open file must be aligned, at least 4096.

    0 where the file system says that it knows no direct reads. Where the kernel cannot tell,
    4096. Source: statx(2), STATX_DIOALIGN.
    """
    statx = getattr(_libc, "statx", None)
    if statx is None:
        return MIN_ALIGNMENT
    answer = (ctypes.c_char * _STATX_BYTES)()
    status = statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer)
    if status != 0:
        return MIN_ALIGNMENT
    mask = int.from_bytes(answer.raw[0:4], "little")
    if not mask & _STATX_DIOALIGN:
        return MIN_ALIGNMENT
    memory = int.from_bytes(answer.raw[_MEMORY_ALIGN_AT : _MEMORY_ALIGN_AT + 4], "little")
    offset = int.from_bytes(answer.raw[_MEMORY_ALIGN_AT + 4 : _MEMORY_ALIGN_AT + 8], "little")
    return max(MIN_ALIGNMENT, memory, offset) if memory and offset else 0


def open_direct(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Return (descriptor, alignment) of `path` opened O_DIRECT, or None where that is refused.

    Raises OSError where the file cannot be opened at all.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise
    alignment = direct_alignment(descriptor)
    if alignment == 0:
        os.close(descriptor)
        return None
    return descriptor, alignment


def aligned_buffer(n_bytes: int) -> npt.NDArray[np.uint8]:
    """Return page-aligned zeroed memory, u8 [n_bytes rounded up to whole pages]."""
    return np.frombuffer(mmap.mmap(-1, -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE), np.uint8)


def bounce_buffer(n_bytes: int) -> npt.NDArray[np.uint8]:
    """Return page-aligned zeroed memory that is read into again and again, u8 as above.

    In huge pages where there are any: the kernel pins every page of it for each read, which on
    small ones takes three times the processor's time. No child gets it: on a page that is shared
    with one since a read began, what the drive writes may be lost.
    """
    n_bytes = -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, n_bytes + HUGE_BYTES, flags=flags)
    memory.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    first = -whole.__array_interface__["data"][0] % HUGE_BYTES
    return whole[first : first + n_bytes]
