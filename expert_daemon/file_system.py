"""Which file system a directory is on. Source: proc_pid_mountinfo(5)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
NETWORK = frozenset(
    ("9p", "afs", "ceph", "cifs", "glusterfs", "lustre", "nfs", "nfs4", "smb3", "virtiofs")
)


@dataclass(frozen=True, slots=True)
class FileSystem:
    """A mounted file system."""

    kind: str  # ext4, xfs, nfs4 and so on; empty: not known
    source: str  # the device, or what else is mounted

    @property
    def is_network(self) -> bool:
        """Whether its bytes come from another machine, or from one's host."""
        return self.kind in NETWORK or self.kind.startswith("fuse.")

    @property
    def name(self) -> str:
        """Kind and source in one word, for a key."""
        return f"{self.kind or 'unknown'} {self.source or 'unknown'}"


def file_system_of(path: Path, mounts: str | None = None) -> FileSystem:
    """Return the file system on which `path` is; raises OSError where there is no such path.

    mounts  the text of mountinfo, the kernel's by default
    """
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    if mounts is None:
        mounts = MOUNTS.read_text(encoding="utf-8", errors="replace")
    resolved = str(path.resolve())
    best, found = -1, FileSystem("", "")
    for line in mounts.splitlines():
        before, dash, after = line.partition(" - ")
        fields, tail = before.split(" "), after.split(" ")
        if not dash or len(fields) < 5 or len(tail) < 2:
            continue
        point = _plain(fields[4])
        inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        # Several mounts may share a device (bind mounts); some file systems have many (btrfs).
        rank = len(point) + (1 << 20) * (fields[2] == wanted)
        if inside and rank > best:
            best, found = rank, FileSystem(tail[0], _plain(tail[1]))
    return found


def _plain(text: str) -> str:
    r"""Undo the octal escapes of mountinfo, such as \040 for a space."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
