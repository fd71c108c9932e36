"""`headrace tune`: measure how this machine's drive is read fastest, and keep that for the daemon.

Reads experts of the model as the daemon would; needs no daemon and disturbs one that runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.errors import ConfigError
from protocol.sizes import format_size

from .terminal import Display
from .writable import check_folder

if TYPE_CHECKING:
    from expert_daemon.tuning import Try, Tuned

SECONDS = 15.0
MOST_SECONDS = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, where the result is kept, and how long it may take."""
    parser.add_argument("model", metavar="MODEL", help="model directory, .gguf file, or demo")
    parser.add_argument(
        "--state-dir", metavar="DIR", help="where the result is kept (default: the daemon's)"
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"about how long (default: {SECONDS:g})"
    )
    parser.add_argument("--no-save", action="store_true", help="measure only")
    parser.add_argument("--json", action="store_true", help="print one object as the last line")


def run(args: argparse.Namespace) -> int:
    """Measure, tell, keep."""
    from expert_daemon.config import default_state_dir
    from expert_daemon.populate import available_bytes
    from expert_daemon.tuned import SMALLEST_BYTES, machine_name, material_of, store_tuned
    from expert_daemon.tuning import tune
    from protocol.files.checkpoint import open_checkpoint, resolve_model

    if not 0 < args.seconds <= MOST_SECONDS:
        raise ConfigError(f"--seconds is {args.seconds:g}, wanted up to {MOST_SECONDS:g}")
    checkpoint = open_checkpoint(resolve_model(args.model))
    free = available_bytes()
    what = material_of(checkpoint, free)
    on = what.on
    is_small = what.slot_bytes < SMALLEST_BYTES
    state_dir: Path | None = None
    if not args.no_save and not is_small:
        state_dir = Path(args.state_dir or default_state_dir(os.environ)).expanduser().absolute()
        check_folder(state_dir, "--state-dir", "--no-save measures only")
    display = Display(quiet=args.json)
    if not args.json:
        sys.stdout.write(f"{checkpoint.directory} on {on.name}\n")

    def told(one: Try) -> None:
        if not args.json:
            sys.stdout.write(_line(one) + "\n")
            sys.stdout.flush()

    try:
        found = tune(checkpoint, available_bytes=free, seconds=args.seconds, told=told)
        figures = _figures(found.best)
        where: Path | None = None
        if state_dir is not None:
            where = store_tuned(
                state_dir,
                what,
                direct=found.direct.reading,
                buffered=found.buffered.reading if found.buffered else None,
                figures=figures,
            )
    except OSError as error:
        raise ConfigError(f"tuning: {error}") from error
    n_bytes = checkpoint.slice_map.image.expert_bytes if is_small else 0
    for line in _closing(found, where, machine_name(), on.name, n_bytes):
        display.line(line)
    if args.json:
        answer = asdict(found.best.reading) | figures
        answer |= {"file_system": on.name, "stored": None if where is None else str(where)}
        sys.stdout.write(json.dumps(answer) + "\n")
    return 0


def _figures(one: Try) -> dict[str, float]:
    return {
        "layer_ms": round(one.layer_ms, 3),
        "expert_ms": round(one.expert_ms, 3),
        "bytes_per_s": round(one.bytes_per_s),
    }


def _line(one: Try) -> str:
    reading = one.reading
    return (
        f"{reading.mode:<8} {reading.threads:>3} threads, {reading.max_parts:>2} parts of "
        f"{reading.cut_bytes >> 10:>5} KiB: {one.layer_ms:8.2f} ms a layer's picks, "
        f"{one.expert_ms:8.2f} ms an expert, {one.bytes_per_s / 1e6:8.0f} MB/s"
    )


def _closing(
    found: Tuned, where: Path | None, machine: str, file_system: str, small: int
) -> list[str]:
    lines = [f"best: {found.best.reading.text}"]
    if not found.fits_in_memory:
        lines.append("The page cache was not tried: the shards do not fit beside an arena.")
    if small:
        size = format_size(small)
        lines.append(f"Not kept: an expert of {size} says nothing about larger ones.")
    elif where is None:
        lines.append("Not kept.")
    else:
        lines.append(f"Kept for machine {machine}, file system {file_system}, in {where}.")
        lines.append("A daemon that is started without --read-mode and --read-threads uses it.")
    return lines
