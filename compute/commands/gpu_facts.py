"""What nvidia-smi says of the GPUs: memory, driver, and the PCIe link they hang on."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass

FIELDS = (
    "name",
    "driver_version",
    "memory.total",
    "compute_cap",
    "pcie.link.gen.gpumax",
    "pcie.link.gen.hostmax",
    "pcie.link.width.current",
    "pcie.link.width.max",
)
QUERY = ("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
# Bytes a second of one lane and direction, after the line code: generation 3 to 6.
_LANE_BYTES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_SHARE = 0.87  # of the link that copies reach; 55 of 63 GB/s was measured on generation 5 x16
# Bytes a second of device memory, as the makers say, by a part of the name.
_MEMORY_BYTES = {
    "B300": 8.0e12,
    "B200": 8.0e12,
    "H200": 4.8e12,
    "GH200": 4.8e12,
    "H100": 3.35e12,
    "A100": 2.0e12,
    "RTX PRO 6000": 1.79e12,
    "5090": 1.79e12,
    "5080": 0.96e12,
    "4090": 1.01e12,
    "3090": 0.936e12,
    "L40S": 0.864e12,
    "A6000": 0.768e12,
    "GB10": 0.273e12,
}


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU; a number is 0 where it is not told."""

    name: str
    driver: str
    memory_bytes: int  # 0: it shares the host's
    capability: str
    link_generation: int  # the best that both ends can do
    gpu_generation: int
    link_width: int
    gpu_width: int

    @property
    def is_unified(self) -> bool:
        """Whether it has no memory of its own."""
        return self.memory_bytes == 0

    @property
    def link_bytes_per_s(self) -> float:
        """What copies from the host's page-locked memory can be expected to reach."""
        return _SHARE * _LANE_BYTES.get(self.link_generation, 0.0) * self.link_width

    @property
    def memory_bytes_per_s(self) -> float:
        """Of its memory, as its maker says; 0 where the name is not known."""
        return next((rate for part, rate in _MEMORY_BYTES.items() if part in self.name), 0.0)


def gpu_facts(run: Callable[[Sequence[str]], str | None]) -> tuple[GpuFacts, ...]:
    """Return every GPU; none where nvidia-smi is missing or fails.

    run   returns what a command prints, None where it cannot be run
    """
    text = run(QUERY)
    rows = csv.reader((text or "").splitlines(), skipinitialspace=True)
    return tuple(_gpu(row) for row in rows if len(row) == len(FIELDS))


def _gpu(row: Sequence[str]) -> GpuFacts:
    name, driver, mib, capability, *link = (word.strip() for word in row)
    gpu_generation, host_generation, width, gpu_width = (_number(word) for word in link)
    both = [generation for generation in (gpu_generation, host_generation) if generation]
    return GpuFacts(
        name=name,
        driver=driver,
        memory_bytes=_number(mib) << 20,
        capability=capability,
        link_generation=min(both, default=0),
        gpu_generation=gpu_generation,
        link_width=width,
        gpu_width=gpu_width,
    )


def _number(word: str) -> int:
    return int(word) if word.isdecimal() else 0
