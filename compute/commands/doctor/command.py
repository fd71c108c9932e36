"""`headrace doctor`: checks this machine for a model and names the fix of each finding.

Reads headers, /proc and /sys, asks nvidia-smi, and reads the drive for half a second. Changes
nothing. The exit status is 0 where nothing is worse than a note, 1 for a warning, 2 for an error.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from compute.commands.gpu_facts import GpuFacts, gpu_facts
from protocol.errors import ConfigError, HeadraceError

from .check import EXIT_STATUS, Check, Host, worst_of

if TYPE_CHECKING:
    from protocol.files.checkpoint import Checkpoint

_COMMAND_S = 10
_COLOURS = {"ok": "32", "note": "36", "warning": "33", "error": "31"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to look at and the form of the output."""
    parser.add_argument("--model", metavar="DIR", help="model to be served (default: demo)")
    parser.add_argument("--runtime-dir", metavar="DIR", help="where the sockets are or will be")
    parser.add_argument("--state-dir", metavar="DIR", help="what outlives a restart")
    parser.add_argument("--json", action="store_true", help="print one object as the last line")


def run(args: argparse.Namespace) -> int:
    """Check, tell, and return the exit status."""
    from .software import installed

    host = Host(os.environ, distributions=installed, run=printed)
    checks = list(all_checks(host, args.model or "demo", args.runtime_dir, args.state_dir))
    worst = worst_of(checks)
    if args.json:
        found = {"checks": [asdict(check) for check in checks], "worst": worst}
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        _print(checks, worst)
    return EXIT_STATUS[worst]


def all_checks(
    host: Host, model: str, runtime_dir: str | None, state_dir: str | None
) -> Iterator[Check]:
    """Yield every check."""
    from .device import device
    from .model import model_checks
    from .software import software, torch_cuda

    gpus = gpu_facts(host.run)
    yield from software(host, gpus)
    yield from device(gpus, torch_cuda())
    found, checkpoint = model_checks(model)
    yield from found
    yield from _of_machine(host, gpus, checkpoint, runtime_dir)
    yield from _of_disks(host, checkpoint, state_dir)


def _of_machine(
    host: Host,
    gpus: tuple[GpuFacts, ...],
    checkpoint: Checkpoint | None,
    runtime_dir: str | None,
) -> Iterator[Check]:
    from compute.commands.machine_memory import machine_memory
    from protocol.runtime_dir import default_runtime_dir

    from .memory import Needs, memory
    from .model import needs_of
    from .place import LiveDaemon, daemon_check, no_runtime_dir, runtime_dir_check

    live = LiveDaemon()
    try:
        directory = Path(runtime_dir or default_runtime_dir(host.environment)).absolute()
    except ConfigError:
        yield no_runtime_dir()
    else:
        yield runtime_dir_check(directory)
        check, live = daemon_check(directory, checkpoint.fingerprint if checkpoint else b"")
        yield check
    on_host = not any(not gpu.is_unified for gpu in gpus)
    needs = needs_of(checkpoint, on_host=on_host) if checkpoint else Needs()
    room = machine_memory(host.root).available_bytes
    yield from memory(host, gpus, room, live.arena_bytes, needs)


def _of_disks(host: Host, checkpoint: Checkpoint | None, state_dir: str | None) -> Iterator[Check]:
    from expert_daemon.config import default_state_dir

    from .drive import drive
    from .place import state_dir_checks

    if checkpoint is not None:
        try:
            yield from drive(host, checkpoint.shards)
        except (OSError, HeadraceError) as error:
            fix = "see the kernel's log; `headrace verify` reads every byte"
            yield Check("drive", "error", str(error), "shards that can be read", fix)
    directory = Path(state_dir) if state_dir else default_state_dir(host.environment)
    yield from state_dir_checks(directory.expanduser().absolute())


def printed(command: Sequence[str]) -> str | None:
    """Return what a command prints; None where it cannot be run or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _print(checks: Sequence[Check], worst: str) -> None:
    colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        word = f"{check.status:<7}"
        word = f"\033[{_COLOURS[check.status]}m{word}\033[0m" if colours else word
        lines.append(f"{word}  {check.name:<{width}}  {check.found}")
        if check.status != "ok":
            margin = " " * (width + 11)
            lines += [f"{margin}wanted: {check.wanted}"] if check.wanted else []
            lines += [f"{margin}fix: {check.fix}"] if check.fix else []
    n_worst = sum(check.status == worst for check in checks)
    summary = "all is well" if worst == "ok" else f"worst: {worst} ({n_worst})"
    sys.stdout.write("\n".join([*lines, summary]) + "\n")
