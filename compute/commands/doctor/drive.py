"""The drive under a model: what it is, how it may be read, and how fast it is when pressed."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.sizes import format_size

from .check import Check, Host

if TYPE_CHECKING:
    from protocol.files.safetensors_header import Shard

SECONDS = 0.5
DEPTH = 16
PIECE_BYTES = 1 << 20
SLOW_BYTES_PER_S = 2e9
LEAST_BYTES_PER_S = 5e8


def drive(host: Host, shards: Sequence[Shard], seconds: float = SECONDS) -> Iterator[Check]:
    """Yield the checks of the file system and the drive that hold the shards."""
    from expert_daemon.file_system import file_system_of

    path = shards[0].path
    on = file_system_of(path)
    found = f"{on.kind or 'unknown'} on {on.source or 'unknown'}"
    if on.is_network:
        fix = "put the model on a local drive: each miss waits for the network"
        yield Check("file system", "warning", found, "a local one", fix)
    else:
        yield Check("file system", "ok", found)
    yield _kind(host, path)
    yield _alignment(path)
    yield _rate(shards, seconds)


def _kind(host: Host, path: Path) -> Check:
    device = path.stat().st_dev
    block = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
    queue = next(
        (
            place
            for place in (f"{block}/queue", f"{block}/../queue")
            if host.read(f"{place}/rotational") is not None
        ),
        None,
    )
    if queue is None:
        return Check("drive", "note", "the kernel does not tell what it is", "NVMe")
    folder = (host.root / block.lstrip("/")).resolve()
    name = next((p.name for p in (folder, folder.parent) if (p / "queue").exists()), "?")
    if name.startswith(("vd", "xvd")):
        return Check("drive", "note", f"{name}, a virtual machine's", "NVMe")
    if host.read(f"{queue}/rotational") == "1":
        fix = "put the model on an NVMe drive"
        return Check("drive", "warning", f"{name}, said to be rotating", "NVMe", fix)
    if name.startswith("nvme"):
        return Check("drive", "ok", f"{name}, NVMe", "NVMe")
    return Check("drive", "note", f"{name}, solid, not NVMe", "NVMe")


def _alignment(path: Path) -> Check:
    from expert_daemon.direct_io import open_direct

    opened = open_direct(path)
    if opened is None:
        fix = "--read-mode buffered, or another file system: reads cost the processor several times"
        return Check("direct reads", "warning", "O_DIRECT is refused", "aligned to 4096", fix)
    os.close(opened[0])
    status = "ok" if opened[1] <= 1 << 16 else "warning"
    return Check("direct reads", status, f"aligned to {opened[1]}", "aligned to 64 KiB at most")


def _rate(shards: Sequence[Shard], seconds: float) -> Check:
    name = f"drive rate, {DEPTH} reads of 1 MiB at a time"
    large = [number for number, shard in enumerate(shards) if shard.n_bytes >= 2 * PIECE_BYTES]
    if not large:
        return Check("drive rate", "note", "the shards are too small to measure it")
    rate = measured_rate(shards, large, seconds)
    found, wanted = f"{rate / 1e9:.2f} GB/s", f"{SLOW_BYTES_PER_S / 1e9:.0f} GB/s or more"
    if sum(shard.n_bytes for shard in shards) < 1 << 30:
        return Check(name, "ok", f"{found}, of a model too small to say much", wanted)
    if rate < SLOW_BYTES_PER_S:
        status = "warning" if rate >= LEAST_BYTES_PER_S else "error"
        fix = "another drive, or a second one and `headrace pack --stripe` over both"
        return Check(name, status, found, wanted, fix)
    return Check(name, "ok", found, wanted)


def measured_rate(shards: Sequence[Shard], large: Sequence[int], seconds: float) -> float:
    """Return bytes a second of random reads past the page cache, DEPTH at a time.

    large   numbers of the shards with room for a piece. Raises OSError, ShardError; the latter
            also where a read does not return.
    """
    from expert_daemon.direct_io import aligned_buffer
    from expert_daemon.source import ReadKind
    from expert_daemon.watched_source import WatchedSource

    source = WatchedSource(shards)
    ends_at = time.perf_counter() + seconds
    counts = [0] * DEPTH
    errors: list[OSError] = []

    def read(number: int) -> None:
        chance, buffer = random.Random(number), aligned_buffer(PIECE_BYTES)
        while time.perf_counter() < ends_at and not errors:
            shard = chance.choice(large)
            n_places = (shards[shard].n_bytes - PIECE_BYTES) // 4096
            offset = 4096 * chance.randrange(n_places + 1)
            kind = ReadKind.DIRECT if source.alignment(shard) > 1 else ReadKind.BUFFERED
            try:
                counts[number] += source.read_into(shard, offset, buffer, kind)
            except OSError as error:
                errors.append(error)

    began = time.perf_counter()
    threads = [
        threading.Thread(target=read, args=(number,), daemon=True) for number in range(DEPTH)
    ]
    for thread in threads:
        thread.start()
    try:
        source.wait(threads)
        took = time.perf_counter() - began
    finally:
        source.close_after(threads)
    if errors:
        raise errors[0]
    return sum(counts) / took


def free_disk(name: str, folder: Path, wanted_bytes: int, why: str) -> Check:
    """Return how much room a folder's file system has; a folder that is to be made counts too."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    room = os.statvfs(place)
    free = room.f_bavail * room.f_frsize
    found, wanted = f"{format_size(free)} free", f"{format_size(wanted_bytes)} {why}"
    if free < wanted_bytes:
        return Check(name, "warning", found, wanted, f"make room in {folder}")
    return Check(name, "ok", found, wanted)
