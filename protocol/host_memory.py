"""What memory this machine has for us: of the host, and of the control groups that we are in.

A service's unit and a container have limits of their own, which the host's figures do not show. In
a group the page cache counts as used, though it gives way: it is taken off.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_LIMIT_NONE = 1 << 60  # control groups write a huge number where there is no limit
_CACHE: tuple[str, ...] = ("inactive_file", "active_file")  # without what is in shared memory


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes; 0 where the machine does not say."""

    total_bytes: int  # of the host
    available_bytes: int  # without pushing anything else out, the control groups' room included
    limit_bytes: int | None  # of the control groups, None: no limit

    @property
    def own_bytes(self) -> int:
        """What there is for us in all: the host's, or the limit where that is less."""
        if self.limit_bytes is None:
            return self.total_bytes
        return min(self.total_bytes or self.limit_bytes, self.limit_bytes)


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Read /proc/meminfo and the control groups' limits, where they are."""
    total, available = _meminfo(root / "proc/meminfo")
    groups = _groups(root)
    limits = [limit for limit, _ in groups]
    rooms = [max(0, limit - used) for limit, used in groups]
    return HostMemory(total, min([available, *rooms]), min(limits, default=None))


def _meminfo(path: Path) -> tuple[int, int]:
    try:
        text = path.read_text()
    except OSError:
        return 0, 0
    sizes = {name: int(kib) << 10 for name, kib in re.findall(r"(\w+):\s+(\d+) kB", text)}
    total = sizes.get("MemTotal", 0)
    return total, sizes.get("MemAvailable", total)


def _groups(root: Path) -> list[tuple[int, int]]:
    """(limit, used) bytes of every control group above this process that has a limit."""
    found: list[tuple[int, int]] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
            cache = _CACHE
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = tuple(f"total_{name}" for name in _CACHE)
        else:
            continue
        directory = top / path.lstrip("/")
        for group in (directory, *directory.parents):
            limit_bytes = _number(group / limit)
            if limit_bytes is not None and limit_bytes < _LIMIT_NONE:
                n_used = _number(group / used) or 0
                found.append((limit_bytes, max(0, n_used - _cached(group, cache))))
            if group == top:
                break
    return found


def _cached(group: Path, names: tuple[str, ...]) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    words = [line.split() for line in lines]
    return sum(int(word[1]) for word in words if len(word) == 2 and word[0] in names)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
