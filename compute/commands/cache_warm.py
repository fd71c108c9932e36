"""`headrace cache warm`: load the experts of the saved hot list, in the order of the files."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.errors import ConfigError, DaemonLost
from protocol.sizes import format_size

if TYPE_CHECKING:
    from protocol.files.checkpoint import Checkpoint
    from protocol.wire.client import ExpertClient

    from .terminal import Display

Key = tuple[int, int]

POLL_S = 0.1
PATIENCE_S = 60.0  # without one expert more: the daemon has better things to do
MOST_FREE = 64  # slots that the daemon keeps free, or an eighth of all


def warm(client: ExpertClient, display: Display, *, as_json: bool) -> int:
    """Ask for the experts and show how far they are; returns the exit status."""
    stats = client.stats()
    hot = _hot_list(client, stats)
    n_slots = int(stats["n_slots"])
    chosen = hot[: n_slots - min(MOST_FREE, n_slots // 8)]
    there = {(int(layer), int(expert)) for layer, expert, _ in client.keys().tolist()}
    wanted = in_file_order(_checkpoint(stats), [key for key in chosen if key not in there])
    began, before = time.monotonic(), int(stats["bytes_read"])
    if wanted:
        client.warm(wanted)
        _watch(client, display, len(wanted))
    seconds = time.monotonic() - began
    found = {(int(layer), int(expert)) for layer, expert, _ in client.keys().tolist()}
    n_bytes = int(client.stats()["bytes_read"]) - before
    n_loaded = len(found & set(wanted))
    display.line(
        f"{n_loaded} of {len(wanted)} experts loaded, {len(chosen) - len(wanted)} were there; "
        f"{format_size(n_bytes)} in {seconds:.1f} s, {n_bytes / max(seconds, 1e-9) / 1e9:.2f} GB/s"
    )
    if as_json:
        answer = {
            "listed": len(hot),
            "wanted": len(wanted),
            "loaded": n_loaded,
            "bytes": n_bytes,
            "seconds": round(seconds, 3),
        }
        sys.stdout.write(json.dumps(answer) + "\n")
    return 0


def _hot_list(client: ExpertClient, stats: dict[str, Any]) -> list[Key]:
    from expert_daemon.hot_list import read_hot_list
    from expert_daemon.model_state import ModelState
    from protocol.arena.identity import read_identity

    fingerprint = read_identity(client.arena.memory).fingerprint
    directory = Path(str(stats["state_directory"]))
    found = read_hot_list(ModelState(directory.parent, fingerprint, 0, save=False))
    if not len(found):
        raise ConfigError(
            f"no hot list in {directory}: a daemon writes one every minute that it serves"
        )
    shape = client.arena.layout
    return [
        (layer, expert)
        for layer, expert in found.tolist()
        if layer < shape.n_layers and expert < shape.n_experts
    ]


def _checkpoint(stats: dict[str, Any]) -> Checkpoint:
    from protocol.files.checkpoint import open_checkpoint

    return open_checkpoint(Path(str(stats["model"])))


def in_file_order(checkpoint: Checkpoint, keys: list[Key]) -> list[Key]:
    """Return the keys as their bytes stand in the shards, so that a drive reads on and on."""
    numbers = {shard: number for number, shard in enumerate(checkpoint.shards)}

    def place(key: Key) -> tuple[int, int]:
        slices = checkpoint.slice_map.slices(*key)
        return min((numbers[one.shard], one.offset) for one in slices if one.n_bytes)

    return sorted(keys, key=place)


def _watch(client: ExpertClient, display: Display, n_wanted: int) -> None:
    """Show a bar until nothing is left to load. Raises DaemonLost where nothing moves for long."""
    display.start_bar("experts", n_wanted)
    began = moved = time.monotonic()
    left = n_wanted
    try:
        while True:
            stats = client.stats()
            now = time.monotonic()
            n_left = int(stats["warm_left"]) + int(stats["n_loading"])
            if n_left < left:
                left, moved = n_left, now
            display.advance_bar(
                n_wanted - left, f"{(n_wanted - left) / (now - began):.0f} a second"
            )
            if not n_left:
                return
            if now - moved > PATIENCE_S:
                raise DaemonLost(
                    f"no expert was loaded for {PATIENCE_S:g} s, {n_left} are left: the daemon "
                    "loads them when it is idle, and goes on by itself"
                )
            time.sleep(POLL_S)
    finally:
        display.end_bar()
