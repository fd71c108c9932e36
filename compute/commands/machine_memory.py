"""How much memory this machine has for a model: host, control group, GPUs. Imports no torch."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_LIMIT_NONE = 1 << 60  # control groups write a huge number where there is no limit
_GPU_QUERY = ("--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
_GPU_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU; 0 bytes where it shares the host's memory."""

    name: str
    n_bytes: int


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """What this process may use."""

    total_bytes: int
    available_bytes: int  # without pushing anything else out, the control group's room included
    limit_bytes: int | None  # of the control group, None: no limit
    gpus: tuple[Gpu, ...]


def machine_memory(root: Path = Path("/")) -> MachineMemory:
    """Read /proc/meminfo, the control group's limits and nvidia-smi, where they are."""
    total, available = _meminfo(root / "proc/meminfo")
    groups = list(_group_directories(root))
    limits = [limit for limit, _ in groups]
    rooms = [max(0, limit - used) for limit, used in groups]
    return MachineMemory(
        total_bytes=total,
        available_bytes=min([available, *rooms]),
        limit_bytes=min(limits, default=None),
        gpus=_gpus(),
    )


def _meminfo(path: Path) -> tuple[int, int]:
    try:
        text = path.read_text()
    except OSError:
        return 0, 0
    sizes = {name: int(kib) << 10 for name, kib in re.findall(r"(\w+):\s+(\d+) kB", text)}
    total = sizes.get("MemTotal", 0)
    return total, sizes.get("MemAvailable", total)


def _group_directories(root: Path) -> list[tuple[int, int]]:
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
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        directory = top / path.lstrip("/")
        for group in (directory, *directory.parents):
            limit_bytes = _number(group / limit)
            if limit_bytes is not None and limit_bytes < _LIMIT_NONE:
                found.append((limit_bytes, _number(group / used) or 0))
            if group == top:
                break
    return found


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _gpus() -> tuple[Gpu, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        done = subprocess.run(
            [program, *_GPU_QUERY],
            capture_output=True,
            text=True,
            timeout=_GPU_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    if done.returncode != 0:
        return ()
    return tuple(_gpu(line) for line in done.stdout.splitlines() if line.strip())


def _gpu(line: str) -> Gpu:
    name, _, mib = line.rpartition(",")
    return Gpu(name.strip(), int(mib) << 20 if mib.strip().isdecimal() else 0)
