"""Mappings of a shared memory file whose addresses suit 2 MiB pages.

A page of 2 MiB is entered into a process's tables as one only where its address is a multiple of
2 MiB; the kernel chooses such addresses for shared memory only where the host's settings ask it to.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

from .rooms import HUGE_BYTES

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]


def map_file(descriptor: int, n_bytes: int, *, writable: bool) -> memoryview:
    """Return the first `n_bytes` of a file, shared, u8, at an address that is a multiple of 2 MiB.

    It stays mapped for as long as a view of it lives. Raises OSError. Source: mmap(2).
    """
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    # Addresses that nobody else is given; the file's own mapping goes over them, and is taken away
    # with them.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    addresses = mmap.mmap(-1, n_bytes + HUGE_BYTES, flags=flags, prot=prot)
    begin = int(np.frombuffer(addresses, np.uint8).__array_interface__["data"][0])
    first = -begin % HUGE_BYTES
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if _libc.mmap(begin + first, n_bytes, prot, flags, descriptor, 0) == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return memoryview(addresses)[first : first + n_bytes]
