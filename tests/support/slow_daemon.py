"""An expert daemon in a process of its own, each of whose reads of expert bytes takes so long.

    python tests/support/slow_daemon.py SECONDS FLAGS...

In the test's own process its readers would share an interpreter lock with compute, which no drive
does: eight that wake at once then come one after the other.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from expert_daemon.__main__ import main
from protocol.files.checkpoint import open_checkpoint, resolve_model
from tests.support.faulty_source import Faults, FaultySource
from tests.support.running_daemon import DaemonProcess


def slow_experts(model: Path, seconds: float) -> Faults:
    """Each read of expert bytes takes so long; rows are read as ever."""
    checkpoint = open_checkpoint(model)
    numbers = {shard: number for number, shard in enumerate(checkpoint.shards)}
    rows = [
        (numbers[part.shard], part.offset, part.offset + part.n_bytes)
        for table in checkpoint.engram_tables
        for part in (table.values, table.scales)
    ]

    def late(shard: int, offset: int, n_bytes: int) -> float:
        is_row = any(s == shard and b <= offset < e for s, b, e in rows)
        return 0.0 if is_row else seconds

    return Faults(late=late)


@contextlib.contextmanager
def slow_daemon(
    model: Path | str, runtime_dir: Path, seconds: float, *flags: str
) -> Iterator[DaemonProcess]:
    """A started one over a model, gone at the end."""
    runtime_dir.mkdir(mode=0o700)
    program = (__file__, str(seconds))
    daemon = DaemonProcess(model, runtime_dir, *flags, program=program)
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.close()


if __name__ == "__main__":
    slow = slow_experts(resolve_model(sys.argv[sys.argv.index("--model") + 1]), float(sys.argv[1]))
    status = main(sys.argv[2:], wrap_source=lambda source: FaultySource(source, slow))
    os._exit(status)
