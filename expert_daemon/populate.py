"""Give shared memory its pages before anybody waits for them, in parallel.

A page's first touch is a fault of its own: 9 times faster with 2 MiB pages, which shared memory
has only where the host allows it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt

from protocol.errors import ConfigError
from protocol.host_memory import host_memory
from protocol.sizes import format_size

from .log import log

PAGE_BYTES = 4096
SPAN_BYTES = 256 << 20  # one call of the kernel, so that many threads find work
HUGE_WORTH_BYTES = 1 << 30
_MADV_POPULATE_WRITE = 23
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

_libc = ctypes.CDLL(None, use_errno=True)


def ask_for_huge_pages(memory: mmap.mmap, n_bytes: int) -> None:
    """Prefer 2 MiB pages for the mapping; log once how to turn them on where that pays."""
    if n_bytes < HUGE_WORTH_BYTES or not (choice := _shmem_enabled()):
        return
    if _is_refused(choice):
        log(
            "the arena has 4 KiB pages; for 2 MiB pages, which start 9 times faster: "
            f"echo advise > {_SHMEM_ENABLED}"
        )
        return
    memory.madvise(mmap.MADV_HUGEPAGE)


def may_have_huge_pages(n_bytes: int) -> bool:
    """Whether an arena of this size gets 2 MiB pages, as far as the host allows them."""
    choice = _shmem_enabled()
    return n_bytes >= HUGE_WORTH_BYTES and choice != "" and not _is_refused(choice)


def _shmem_enabled() -> str:
    try:
        return _SHMEM_ENABLED.read_text()
    except OSError:
        return ""


def _is_refused(choice: str) -> bool:
    return "[never]" in choice or "[deny]" in choice


def populate(memory: npt.NDArray[np.uint8], ranges: list[tuple[int, int]], n_threads: int) -> None:
    """Give every page of the (offset, bytes) ranges its memory; the bytes stay what they are.

    Raises ConfigError where the machine has not as much.
    """
    spans = [
        (start, min(SPAN_BYTES, offset + n_bytes - start))
        for offset, n_bytes in ranges
        for start in range(offset, offset + n_bytes, SPAN_BYTES)
    ]
    failures: list[int] = []
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not spans or failures:
                    return
                start, n_bytes = spans.pop()
            code = _populate_span(memory, start, n_bytes)
            if code:
                failures.append(code)

    n_helpers = max(0, min(n_threads, len(spans)) - 1)
    threads = [threading.Thread(target=work, daemon=True) for _ in range(n_helpers)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if failures:
        wanted = format_size(sum(n_bytes for _, n_bytes in ranges))
        raise ConfigError(f"arena: {wanted} cannot be had: {os.strerror(failures[0])}")


def _populate_span(memory: npt.NDArray[np.uint8], start: int, n_bytes: int) -> int:
    """Return 0 or an errno."""
    first = start // PAGE_BYTES * PAGE_BYTES
    address = int(memory.__array_interface__["data"][0]) + first
    length = -(-(start + n_bytes - first) // PAGE_BYTES) * PAGE_BYTES
    status = _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)
    if status == 0:
        return 0
    code = ctypes.get_errno()
    if code != errno.EINVAL:
        return code
    pages = memory[first : first + length : PAGE_BYTES]  # a kernel older than 5.14
    pages += np.uint8(0)
    return 0


def punch_hole(descriptor: int, offset: int, n_bytes: int) -> None:
    """Give a range of a shared memory file back to the machine; it reads as zeros then.

    Source: fallocate(2). Raises OSError.
    """
    status = _libc.fallocate(
        ctypes.c_int(descriptor),
        ctypes.c_int(_FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE),
        ctypes.c_int64(offset),
        ctypes.c_int64(n_bytes),
    )
    if status != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def available_bytes() -> int:
    """Return the memory that the machine, or our control group, could give now; 0: unknown."""
    memory = host_memory()
    return max(memory.available_bytes, 1) if memory.total_bytes else 0
