"""The host's memory: how much of it an arena could have, and what stands in an arena's way."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass

from compute.commands.gpu_facts import GpuFacts
from protocol.sizes import format_size

from .check import Check, Host

SPARE_BYTES = 2 << 30  # beside arena and dense weights, for everything else
_SHMEM = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
_RELEASE = "/proc/sys/kernel/osrelease"
_GATHERS = (6, 1)  # the first Linux that gives huge pages to who asks, whatever _SHMEM says


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model wants of the host; 0 where no model was named."""

    smallest_arena: int = 0
    expert_bytes: int = 0  # all experts together
    dense_bytes: int = 0  # that the host must hold: 0 with a discrete GPU


def memory(
    host: Host,
    gpus: tuple[GpuFacts, ...],
    room_bytes: int,
    held_bytes: int,
    needs: Needs,
    memlock: int | None = None,
) -> Iterator[Check]:
    """Yield the checks.

    room_bytes   available now, the control group's limit counted in
    held_bytes   by the arena of a daemon that runs: a new daemon would get it
    memlock      the limit of page-locked memory in bytes; None: this process's
    """
    yield _ledger(room_bytes, held_bytes, needs)
    yield _memlock(
        resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if memlock is None else memlock, gpus
    )
    yield _huge_pages(host)
    yield _swap(host)


def _ledger(room_bytes: int, held_bytes: int, needs: Needs) -> Check:
    largest = room_bytes + held_bytes - needs.dense_bytes - SPARE_BYTES
    parts = [f"{format_size(room_bytes)} available"]
    if held_bytes:
        parts.append(f"{format_size(held_bytes)} in the arena of the daemon that runs")
    if needs.dense_bytes:
        parts.append(f"less {format_size(needs.dense_bytes)} of dense weights")
    parts.append(f"less {format_size(SPARE_BYTES)} for everything else")
    found = f"{', '.join(parts)}: an arena of {format_size(max(0, largest))} at most"
    if not needs.smallest_arena:
        return Check("memory", "ok", found)
    wanted = (
        f"{format_size(needs.smallest_arena)} at least, "
        f"{format_size(needs.expert_bytes)} for all experts"
    )
    if largest < needs.smallest_arena:
        fix = "end what else uses memory, raise the control group's limit, or add memory"
        return Check("memory", "error", found, wanted, fix)
    return Check("memory", "ok", found, wanted)


def _memlock(limit: int, gpus: tuple[GpuFacts, ...]) -> Check:
    unlimited = limit in (-1, resource.RLIM_INFINITY)
    found = "unlimited" if unlimited else format_size(limit)
    if unlimited or not gpus:
        return Check("memlock limit", "ok", found)
    fix = (
        "LimitMEMLOCK=infinity in a unit (deploy/ has it); "
        "in a shell: memlock in /etc/security/limits.conf, or ulimit -l unlimited"
    )
    return Check("memlock limit", "warning", found, "unlimited, to page-lock the arena", fix)


def _huge_pages(host: Host) -> Check:
    name, wanted = "huge pages", "advise, within_size or always"
    text = host.read(_SHMEM)
    if text is None:
        return Check(name, "note", "the kernel does not tell", wanted)
    match = re.search(r"\[(\w+)\]", text)
    found = match[1] if match else text
    release = re.match(r"(\d+)\.(\d+)", host.read(_RELEASE) or "")
    if found == "never" and release and (int(release[1]), int(release[2])) >= _GATHERS:
        return Check(name, "ok", f"Linux {release[0]} gives them to an arena that asks for them")
    if found in ("never", "deny"):
        fix = f"echo advise > {_SHMEM}: a large arena starts 9 times faster"
        return Check(name, "warning", f"shmem_enabled is {found}", wanted, fix)
    return Check(name, "ok", f"shmem_enabled is {found}", wanted)


def _swap(host: Host) -> Check:
    text = host.read("/proc/meminfo") or ""
    sizes = {name: int(kib) << 10 for name, kib in re.findall(r"(\w+):\s+(\d+) kB", text)}
    total, free = sizes.get("SwapTotal", 0), sizes.get("SwapFree", 0)
    if not total:
        return Check("swap", "ok", "none")
    found = f"{format_size(total)}, {format_size(total - free)} used"
    if total - free > 1 << 30:
        fix = "MemorySwapMax=0 in the daemon's unit (deploy/ has it), a smaller --arena, or swapoff"
        return Check(
            "swap", "warning", found, "none used: an arena in swap is slower than none", fix
        )
    return Check("swap", "ok", found)
