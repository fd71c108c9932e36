"""The GPU: its driver, the link it hangs on, whether its memory is the host's."""

from __future__ import annotations

from collections.abc import Iterator

from compute.commands.gpu_facts import GpuFacts
from protocol.sizes import format_size

from .check import Check
from .software import OLDEST_DRIVER

GOOD_LINK = 25e9  # bytes a second, about PCIe 4 x16


def device(gpus: tuple[GpuFacts, ...], cuda: str | None) -> Iterator[Check]:
    """Yield the checks of every GPU.

    cuda   the version that torch was built for
    """
    if not gpus:
        wanted = "one, for anything larger than the demo"
        fix = "with a GPU in this machine: install its driver, so that nvidia-smi finds it"
        yield Check("gpu", "note", "no NVIDIA GPU", wanted, fix)
        return
    for number, gpu in enumerate(gpus):
        name = "gpu" if len(gpus) == 1 else f"gpu {number}"
        yield Check(name, "ok", f"{gpu.name}, compute capability {gpu.capability}")
        yield _driver(f"{name} driver", gpu, cuda)
        if gpu.is_unified:
            yield Check(f"{name} memory", "ok", "unified: new tokens read the arena in place")
            continue
        size = format_size(gpu.memory_bytes)
        found = f"discrete, {size}: the most used experts go there, the arena is the second tier"
        yield Check(f"{name} memory", "ok", found)
        yield _link(f"{name} link", gpu)


def _driver(name: str, gpu: GpuFacts, cuda: str | None) -> Check:
    major = int(cuda.partition(".")[0]) if cuda else 0
    oldest = OLDEST_DRIVER.get(major, 0)
    found_major = gpu.driver.partition(".")[0]
    if not oldest or not found_major.isdecimal():
        return Check(name, "ok", gpu.driver or "not told")
    wanted = f"{oldest} or newer, for CUDA {cuda}"
    if int(found_major) < oldest:
        fix = "install a newer driver, or a torch for an older CUDA"
        return Check(name, "error", gpu.driver, wanted, fix)
    return Check(name, "ok", gpu.driver, wanted)


def _link(name: str, gpu: GpuFacts) -> Check:
    if not gpu.link_width or not gpu.link_generation:
        return Check(name, "note", "nvidia-smi does not tell")
    found = (
        f"PCIe {gpu.link_generation} x{gpu.link_width}, "
        f"about {gpu.link_bytes_per_s / 1e9:.0f} GB/s of copies"
    )
    wanted = f"PCIe {gpu.gpu_generation} x{gpu.gpu_width}, all that the card can do"
    if gpu.link_width < gpu.gpu_width:
        fix = "put the card into a slot with all lanes; see that no drive shares them"
        return Check(name, "warning", found, wanted, fix)
    if gpu.link_generation < gpu.gpu_generation:
        fix = "the slot or the firmware's settings hold the link to an older generation"
        return Check(name, "warning", found, wanted, fix)
    if gpu.link_bytes_per_s < GOOD_LINK:
        fix = "a slot with more lanes: each pick that is not on the card crosses this link"
        return Check(name, "note", found, wanted, fix)
    return Check(name, "ok", found, wanted)
