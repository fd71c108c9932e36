"""An expert daemon in a process of its own, each of whose reads of expert bytes takes so long.

    python tests/support/slow_daemon.py SECONDS SEED FLAGS...

With a SEED above 0 each takes a random part of that, most of them a small one.

In the test's own process its readers would share an interpreter lock with compute, which no drive
does: eight that wake at once then come one after the other.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from expert_daemon.__main__ import main
from protocol.files.checkpoint import open_checkpoint, resolve_model
from tests.support.faulty_source import Faults, FaultySource
from tests.support.running_daemon import DaemonProcess


def slow_experts(model: Path, seconds: float, seed: int) -> Faults:
    """Each read of expert bytes takes so long; rows are read as ever."""
    dice = random.Random(seed)
    checkpoint = open_checkpoint(model)
    numbers = {shard: number for number, shard in enumerate(checkpoint.shards)}
    rows = [
        (numbers[part.shard], part.offset, part.offset + part.n_bytes)
        for table in checkpoint.engram_tables
        for part in (table.values, table.scales)
    ]

    def late(shard: int, offset: int, n_bytes: int) -> float:
        is_row = any(s == shard and b <= offset < e for s, b, e in rows)
        part = dice.random() ** 3 if seed else 1.0
        return 0.0 if is_row else seconds * part

    return Faults(late=late)


@contextlib.contextmanager
def slow_daemon(
    model: Path | str, runtime_dir: Path, seconds: float, *flags: str, seed: int = 0
) -> Iterator[DaemonProcess]:
    """A started one over a model, gone at the end."""
    runtime_dir.mkdir(mode=0o700, exist_ok=True)
    program = (__file__, str(seconds), str(seed))
    daemon = DaemonProcess(model, runtime_dir, *flags, program=program)
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.close()


if __name__ == "__main__":
    shards = resolve_model(sys.argv[sys.argv.index("--model") + 1])
    slow = slow_experts(shards, float(sys.argv[1]), int(sys.argv[2]))
    status = main(sys.argv[3:], wrap_source=lambda source: FaultySource(source, slow))
    os._exit(status)
