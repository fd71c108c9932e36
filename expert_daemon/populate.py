"""Give shared memory its pages before anybody waits for them, in parallel.

A page's first touch is a fault of its own. Pages of 2 MiB are there nine times as soon, and who
uses them, the drive's driver and the GPU's included, has a 512th of the entries to look up. Shared
memory gets them where the host's setting allows it; since Linux 6.1 the kernel also gathers small
ones into one for who asks, whatever the setting says but `deny`. Where only the first of the small
ones is there, that is no more work than a page of 2 MiB from the start.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from protocol.arena.mapping import map_file
from protocol.arena.rooms import HUGE_BYTES, PAGE_BYTES
from protocol.errors import ConfigError
from protocol.host_memory import host_memory
from protocol.sizes import format_size

from .log import log

SPAN_BYTES = 256 << 20  # one call of the kernel, so that many threads find work
SPLIT_S, SPLIT_PAUSE_S = 0.02, 0.001  # a part of an expert is read in less
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_MAPS = Path("/proc/self/smaps")
_HUGE = "ShmemPmdMapped:"
_SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

_libc = ctypes.CDLL(None, use_errno=True)


def populate(
    memory: npt.NDArray[np.uint8], descriptor: int, ranges: list[tuple[int, int]], n_threads: int
) -> None:
    """Give every page of the (offset, bytes) ranges its memory; the bytes stay what they are.

    memory      u8, the whole file of `descriptor` as `map_file` maps it

    In pages of 2 MiB where none of one has been there before and the machine has one to give.
    Raises ConfigError where the machine has not as much.
    """
    spans = [span for offset, n_bytes in ranges for span in _spans(offset, offset + n_bytes)]
    failures: list[int] = []
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not spans or failures:
                    return
                start, stop = spans.pop()
            _make_huge(memory, descriptor, start, stop)
            code = _populate_span(memory, start, stop - start)
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


def _spans(start: int, stop: int) -> list[tuple[int, int]]:
    """Return (start, stop) of the pieces between the multiples of SPAN_BYTES."""
    cuts = range(start // SPAN_BYTES * SPAN_BYTES + SPAN_BYTES, stop, SPAN_BYTES)
    return list(zip([start, *cuts], [*cuts, stop], strict=True))


def _make_huge(memory: npt.NDArray[np.uint8], descriptor: int, start: int, stop: int) -> None:
    """Give the span pages of 2 MiB where it holds nothing; what fails is left for small ones."""
    first = -(-start // HUGE_BYTES) * HUGE_BYTES
    end = stop // HUGE_BYTES * HUGE_BYTES
    if first >= end or _next_data(descriptor, first) < end:
        return
    _madvise(memory, first, end - first, _MADV_HUGEPAGE)  # for older kernels, if the host allows it
    for offset in range(first, end, HUGE_BYTES):  # the kernel gathers where there is a page
        if _madvise(memory, offset, PAGE_BYTES, _MADV_POPULATE_WRITE):
            return
    _madvise(memory, first, end - first, _MADV_COLLAPSE)


def _next_data(descriptor: int, offset: int) -> int:
    """Return where the file's first page from `offset` on is that has memory, or may have."""
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError as error:
        return 1 << 62 if error.errno == errno.ENXIO else offset  # none, or the kernel cannot tell


def _populate_span(memory: npt.NDArray[np.uint8], start: int, n_bytes: int) -> int:
    """Return 0 or an errno."""
    first = start // PAGE_BYTES * PAGE_BYTES
    length = -(-(start + n_bytes - first) // PAGE_BYTES) * PAGE_BYTES
    code = _madvise(memory, first, length, _MADV_POPULATE_WRITE)
    if code != errno.EINVAL:
        return code
    pages = memory[first : first + length : PAGE_BYTES]  # a kernel older than 5.14
    pages += np.uint8(0)
    return 0


def _madvise(memory: npt.NDArray[np.uint8], offset: int, n_bytes: int, advice: int) -> int:
    """Return 0 or an errno. Source: madvise(2)."""
    address = int(memory.__array_interface__["data"][0]) + offset
    status = _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(n_bytes), advice)
    return ctypes.get_errno() if status else 0


def huge_bytes(memory: npt.NDArray[np.uint8]) -> int:
    """Return how much of a mapping of shared memory stands in pages of 2 MiB. Source: proc(5)."""
    address = int(memory.__array_interface__["data"][0])
    ends = (address, address + memory.nbytes)
    found, is_ours = 0, False
    try:
        with _MAPS.open(encoding="ascii", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(" ")
                if name.endswith(":"):
                    found += int(value.split()[0]) << 10 if is_ours and name == _HUGE else 0
                else:
                    first, _, last = name.partition("-")
                    is_ours = ends[0] <= int(first, 16) and int(last, 16) <= ends[1]
    except OSError:
        return 0
    return found


def is_huge(memory: npt.NDArray[np.uint8]) -> bool:
    """Whether most of a mapping of shared memory stands in pages of 2 MiB."""
    return 2 * huge_bytes(memory) > memory.nbytes


def shared_memory(n_bytes: int) -> npt.NDArray[np.uint8]:
    """Return u8 [n_bytes] as an arena's are, in pages of the same size; raises ConfigError."""
    descriptor = os.memfd_create("headrace-memory", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, n_bytes)
        memory = np.frombuffer(map_file(descriptor, n_bytes, writable=True), np.uint8)
        populate(memory, descriptor, [(0, n_bytes)], n_threads=1)
    finally:
        os.close(descriptor)
    return memory


def tell_of_small_pages() -> None:
    """Log how a host that gives shared memory no pages of 2 MiB is told to, where it is that."""
    try:
        choice = _SHMEM_ENABLED.read_text()
    except OSError:  # no kernel that could
        return
    if "[never]" in choice or "[deny]" in choice:
        log(
            "the arena has 4 KiB pages; for 2 MiB pages, which start 9 times faster: "
            f"echo advise > {_SHMEM_ENABLED}"
        )


def punch_hole(descriptor: int, offset: int, n_bytes: int, *, tries_s: float = SPLIT_S) -> bool:
    """Give a range of a shared memory file back to the machine; it reads as zeros then.

    A page of 2 MiB of which a part is to stay is split for that, which the kernel cannot do while a
    drive writes into it: then it is tried again for `tries_s`. False where that was not enough.

    Source: fallocate(2). Raises OSError.
    """
    ends = time.monotonic() + tries_s
    while True:
        _punch(descriptor, offset, n_bytes)
        if _next_data(descriptor, offset) >= offset + n_bytes:
            return True
        if time.monotonic() > ends:
            return False
        time.sleep(SPLIT_PAUSE_S)


def _punch(descriptor: int, offset: int, n_bytes: int) -> None:
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
