"""How much memory this machine has for a model: host, control group, GPUs. Imports no torch."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from protocol.host_memory import host_memory

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
    """Read the host's memory, the control groups' limits and nvidia-smi, where they are."""
    host = host_memory(root)
    return MachineMemory(host.total_bytes, host.available_bytes, host.limit_bytes, _gpus())


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
