"""The machine that is planned for: this one as measured, or one that flags describe."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from compute.commands.gpu_facts import GpuFacts

from .rates import Device, Drive

if TYPE_CHECKING:
    from protocol.files.safetensors_header import Shard

DRIVE_S = 0.5  # each of the two measurements
MEMORY_BYTES = 64 << 20
N_PROBES = 32
# bf16 operations a second of dense products, as the makers say, by a part of the name.
_FLOPS = {
    "B200": 2.25e15,
    "H200": 0.99e15,
    "H100": 0.99e15,
    "A100": 0.312e15,
    "RTX PRO 6000": 0.5e15,
    "5090": 0.21e15,
    "4090": 0.165e15,
    "GB10": 0.125e15,
}


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is for headrace."""

    host_bytes: int  # memory that may be used
    device_bytes: int  # the GPU's own; 0: none
    device: Device
    drive: Drive
    notes: tuple[str, ...]  # where figures come from


def host_bytes_per_s() -> float:
    """Measure how fast this host's memory is read: the best of a few sums."""
    memory = np.ones(MEMORY_BYTES // 8, np.int64)
    best = 1.0
    for _ in range(5):
        began = time.perf_counter()
        int(memory.sum())
        best = min(best, time.perf_counter() - began)
    return MEMORY_BYTES / best


def device_of(gpus: Sequence[GpuFacts], host_rate: Callable[[], float]) -> tuple[Device, str]:
    """Return the first GPU, else the CPU, and where its rates come from."""
    if not gpus:
        return Device("cpu", host_rate()), "CPU: memory rate measured now"
    gpu = gpus[0]
    flops = next((flops for part, flops in _FLOPS.items() if part in gpu.name), 0.0)
    rate = gpu.memory_bytes_per_s
    source = f"{gpu.name}: rates as its maker says"
    if not rate:
        rate, source = 1e12, f"{gpu.name}: not known here, 1 TB/s assumed (--device-rate)"
    if gpu.is_unified:
        return Device("unified", rate, flops=flops), source
    return Device("discrete", rate, gpu.link_bytes_per_s or 12e9, flops), source


def measured_drive(shards: Sequence[Shard], n_threads: int) -> tuple[Drive, str]:
    """Measure the drive under a model: its rate at depth, and one read's latency."""
    from compute.commands.doctor.drive import DEPTH, PIECE_BYTES, measured_rate
    from expert_daemon.direct_io import aligned_buffer
    from expert_daemon.source import FileSource, ReadKind

    large = [number for number, shard in enumerate(shards) if shard.n_bytes >= 2 * PIECE_BYTES]
    if not large:
        return Drive(1e9, 1e-4, n_threads), "drive: shards too small to measure, 1 GB/s assumed"
    rate = measured_rate(shards, large, DRIVE_S)
    source = FileSource([shards[large[0]]], direct=True)
    buffer = aligned_buffer(4096)
    kind = ReadKind.DIRECT if source.alignment(0) > 1 else ReadKind.BUFFERED
    places = np.random.default_rng(0).integers(0, shards[large[0]].n_bytes // 4096, N_PROBES)
    times = []
    for place in places.tolist():
        began = time.perf_counter()
        source.read_into(0, 4096 * place, buffer, kind)
        times.append(time.perf_counter() - began)
    source.close()
    latency = float(np.median(times))
    text = (
        f"drive: measured now, {rate / 1e9:.2f} GB/s at {DEPTH} reads of 1 MiB, "
        f"{1e6 * latency:.0f} us a read of 4 KiB"
    )
    return Drive(rate, latency, n_threads), text
