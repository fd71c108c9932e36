"""Many small reads at once: Linux AIO by its system calls, one of which submits a whole batch.

Reads of files opened O_DIRECT only: of others the kernel makes each submission wait. Invariants: a
DeepReads belongs to one thread; when `read` returns, nothing is outstanding. Source: io_submit(2),
linux/aio_abi.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

DEPTH = 128  # reads outstanding at most
REAP = 32  # completions that are waited for at once
_SYSCALLS = {
    "x86_64": (206, 207, 208, 209),  # io_setup, io_destroy, io_getevents, io_submit
    "aarch64": (0, 1, 4, 2),
    "riscv64": (0, 1, 4, 2),
}
_IOCB = np.dtype(
    [
        ("data", "<u8"),
        ("key", "<u4"),
        ("rw_flags", "<i4"),
        ("opcode", "<u2"),  # 0: pread
        ("priority", "<i2"),
        ("descriptor", "<u4"),
        ("buffer", "<u8"),
        ("n_bytes", "<u8"),
        ("offset", "<i8"),
        ("reserved", "<u8"),
        ("flags", "<u4"),
        ("event", "<u4"),
    ]
)
_EVENT = np.dtype([("data", "<u8"), ("iocb", "<u8"), ("result", "<i8"), ("result2", "<i8")])

Integers = npt.NDArray[np.int64]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


@dataclass(frozen=True, slots=True)
class Reads:
    """Ranges to read, parallel arrays; offsets, sizes and addresses aligned as O_DIRECT asks."""

    descriptors: Integers
    offsets: Integers
    n_bytes: Integers
    addresses: Integers  # in memory that outlives the reads


class DeepReads:
    """One kernel queue of DEPTH reads."""

    def __init__(self) -> None:
        """Raises OSError where this kernel or machine has no AIO."""
        numbers = _SYSCALLS.get(platform.machine())
        if numbers is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        setup, self._destroy, self._getevents, self._submit = numbers
        context = ctypes.c_ulong(0)
        _call(setup, DEPTH, ctypes.byref(context))
        self._context = context.value
        self._iocbs = np.zeros(DEPTH, _IOCB)
        self._events = np.zeros(DEPTH, _EVENT)
        self._pointers = np.zeros(DEPTH, np.uint64)
        self._first = self._iocbs.ctypes.data

    def read(self, reads: Reads) -> Integers:
        """Return what each read gave: bytes, fewer at the end of a file, or -errno."""
        n_reads = len(reads.offsets)
        results = np.zeros(n_reads, np.int64)
        free = np.arange(DEPTH)
        n_begun = n_ended = 0
        while n_ended < n_reads:
            wanted = min(len(free), n_reads - n_begun)
            if wanted:
                n_taken = self._begin(reads, n_begun, free[:wanted])
                if n_taken < 0:
                    results[n_begun] = n_taken
                    n_begun += 1
                    n_ended += 1
                    continue
                free = free[n_taken:]
                n_begun += n_taken
            ended = self._wait(min(n_begun - n_ended, REAP))
            results[ended["data"]] = ended["result"]
            free = np.concatenate((free, (ended["iocb"] - self._first).astype(np.int64) // 64))
            n_ended += len(ended)
        return results

    def close(self) -> None:
        """Give the queue back."""
        _call(self._destroy, self._context)

    def _begin(self, reads: Reads, first: int, places: Integers) -> int:
        """Submit the next reads; return how many the kernel took, or -errno of the first one."""
        n_reads = len(places)
        part = slice(first, first + n_reads)
        iocbs = self._iocbs
        iocbs["data"][places] = np.arange(first, first + n_reads)
        iocbs["descriptor"][places] = reads.descriptors[part]
        iocbs["buffer"][places] = reads.addresses[part]
        iocbs["n_bytes"][places] = reads.n_bytes[part]
        iocbs["offset"][places] = reads.offsets[part]
        self._pointers[:n_reads] = self._first + places * _IOCB.itemsize
        try:
            return _call(self._submit, self._context, n_reads, self._pointers.ctypes.data)
        except OSError as error:
            return -(error.errno or errno.EIO)

    def _wait(self, n_least: int) -> npt.NDArray[np.void]:
        """Return the reads that have ended, at least so many."""
        n_ended = _call(
            self._getevents, self._context, n_least, DEPTH, self._events.ctypes.data, None
        )
        return self._events[:n_ended]


def _call(number: int, *arguments: object) -> int:
    """Make a system call, again after an interrupt; raises OSError."""
    passed = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    while True:
        result = int(_libc.syscall(ctypes.c_long(number), *passed))
        if result >= 0:
            return result
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
