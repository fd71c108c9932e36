"""An arena that lost its daemon and is held by a living process: its engine, or a reader.

A daemon that nobody handed an arena looks for one here before it starts cold. The name of the
arena's memory tells which runtime directory it belongs to, and a lock whether a daemon serves it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import xxhash

from protocol.arena.fds import check_arena
from protocol.errors import ProtocolError

PREFIX = "headrace-arena"


def arena_name(runtime_dir: Path) -> str:
    """Return what the memory of a runtime directory's arena is called in /proc."""
    return f"{PREFIX}-{xxhash.xxh3_64_hexdigest(str(runtime_dir).encode())}"


def claim(descriptor: int) -> bool:
    """Take an arena for this process, until its end; False where another daemon has it.

    The lock is the process's own: those that hold the same descriptor do not keep it.
    """
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
    except OSError:
        return False
    return True


def find_arena(runtime_dir: Path, fingerprint: bytes) -> tuple[int, int] | None:
    """Return (descriptor, pid of a holder) of this directory's arena, or None.

    Of several the one with the highest generation. It may be served by another daemon still:
    `claim` tells.
    """
    best: tuple[int, int, int] | None = None  # generation, descriptor, pid
    seen: set[int] = set()
    for pid, path in _holders(arena_name(runtime_dir)):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        inode = os.fstat(descriptor).st_ino
        generation = _generation(descriptor, fingerprint) if inode not in seen else -1
        seen.add(inode)
        if generation > (best[0] if best else -1):
            if best:
                os.close(best[1])
            best = (generation, descriptor, pid)
        else:
            os.close(descriptor)
    return None if best is None else best[1:]


def _generation(descriptor: int, fingerprint: bytes) -> int:
    try:
        identity = check_arena(descriptor)
    except (ProtocolError, OSError):
        return -1
    return identity.daemon_generation if identity.fingerprint == fingerprint else -1


def _holders(name: str) -> Iterator[tuple[int, str]]:
    """(pid, path) of each descriptor of ours in /proc that is memory of this name."""
    wanted = f"/memfd:{name} "  # the kernel adds " (deleted)"
    uid = os.geteuid()
    for process in os.listdir("/proc"):  # noqa: PTH208
        if not process.isdecimal() or int(process) == os.getpid():
            continue
        folder = f"/proc/{process}/fd"
        try:
            if os.stat(folder).st_uid != uid:  # noqa: PTH116
                continue
            for number in os.listdir(folder):  # noqa: PTH208
                path = f"{folder}/{number}"
                if os.readlink(path).startswith(wanted):  # noqa: PTH115
                    yield int(process), path
        except OSError:  # it has ended, or keeps its descriptors to itself
            continue
