"""`headrace verify`: every byte of a model directory read, its hashes compared where it has some.

With `--runtime` nothing of that: the ways to decode are compared, see runtime_check.py.

Of a pack every record, file and mirror is held to the hashes that pack wrote. Official and GGUF
shards carry none: headers, ranges and sizes are checked, every byte is read, and compared with what
an earlier `--record` kept. Linked shards of a pack are such shards too; of them size, header and
time are held to the manifest. What was compared and what was only read is said. Imports no torch.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .directory_checks import KeptCheck
    from .file_checks import CheckedFile, Fault

DEFAULT_JOBS = 8
MAX_JOBS = 256
BAD = 1
NAMES_MAX = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the directory and how it is read."""
    from .runtime_check import add_runtime_arguments

    parser.add_argument(
        "directory", metavar="MODEL", nargs="?", help="model directory, .gguf file, or demo"
    )
    parser.add_argument(
        "--record", action="store_true", help="keep hashes of shards that have none, for next time"
    )
    parser.add_argument(
        "--jobs", metavar="N", type=int, default=DEFAULT_JOBS,
        help=f"reads at a time (default: {DEFAULT_JOBS})",
    )  # fmt: skip
    parser.add_argument(
        "--state-dir", metavar="DIR", help="where hashes are kept (default: as the daemon's)"
    )
    parser.add_argument(
        "--json", action="store_true", help="progress and result as JSON, an object a line"
    )
    add_runtime_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Read everything, name what is bad; 1 where anything is."""
    from protocol.errors import ConfigError

    if args.directory is not None and args.model is not None:
        raise ConfigError("both MODEL and --model were given; one of them is wanted")
    args.model = args.directory or args.model
    if args.runtime:
        from .runtime_check import run_runtime

        return run_runtime(args)
    if args.model is None:
        raise ConfigError("no model: give MODEL")
    if args.tokens is not None:
        raise ConfigError("--tokens is for --runtime, which was not given")
    return _read_all(args)


def _read_all(args: argparse.Namespace) -> int:
    from compute.options import path
    from expert_daemon.config import default_state_dir
    from protocol.errors import ConfigError
    from protocol.files.checkpoint import resolve_model

    from .byte_report import Report
    from .file_checks import FileChecks

    if not 1 <= args.jobs <= MAX_JOBS:
        raise ConfigError(f"--jobs: {args.jobs} is not a number from 1 to {MAX_JOBS}")
    given = args.state_dir
    state_dir = default_state_dir(os.environ) if given is None else path(given, "--state-dir")
    directory = resolve_model(args.model)
    checks, faults, kept = _checks(directory, state_dir, record=args.record)
    report = Report("verifying", as_json=args.json)
    report.start(sum(check.n_bytes for check in checks), files=len(checks))
    try:
        faults += FileChecks(checks, report.add).run(args.jobs)
    finally:
        facts = report.end()
    faults = faults or _faults_of_the_whole(directory)
    for fault in faults:
        report.line(f"bad: {fault}")
    report.line(_closing_line(directory, faults, facts, kept))
    report.event(
        "done",
        directory=str(directory),
        bad=[asdict(fault) | {"path": str(fault.path)} for fault in faults],
        compared_bytes=facts["bytes"] - kept.n_uncompared_bytes,
        uncompared=[str(shard.path) for shard in kept.uncompared],
        recorded_files=kept.n_recorded,
        **facts,
    )
    return BAD if faults else 0


def _checks(
    directory: Path, state_dir: Path, *, record: bool
) -> tuple[list[CheckedFile], list[Fault], KeptCheck]:
    """What is to be read, what is bad already, and the hashes that are kept."""
    from protocol.files.checkpoint import open_checkpoint
    from protocol.files.pack_manifest import is_pack, read_manifest

    from .directory_checks import KeptCheck, pack_checks, shard_checks
    from .kept_hashes import KeptHashes

    if not is_pack(directory):
        checkpoint = open_checkpoint(directory)
        hashes = KeptHashes(state_dir, checkpoint.fingerprint, directory)
        kept = KeptCheck(hashes, record=record)
        return shard_checks(checkpoint, kept), [], kept
    manifest = read_manifest(directory)
    kept = KeptCheck(KeptHashes(state_dir, manifest.pack_id, directory), record=record)
    checks, faults = pack_checks(directory, manifest, kept)
    return checks, faults, kept


def _faults_of_the_whole(directory: Path) -> list[Fault]:
    """What is wrong with a directory whose every file is as it was written."""
    from protocol.errors import ConfigError, ShardError
    from protocol.files.checkpoint import open_checkpoint

    from .file_checks import Fault

    try:
        open_checkpoint(directory, incomplete=True)
    except (ConfigError, ShardError) as error:
        return [Fault(directory, str(error).removeprefix(f"{directory}: "))]
    return []


def _closing_line(
    directory: Path, faults: list[Fault], facts: dict[str, Any], kept: KeptCheck
) -> str:
    from protocol.sizes import format_size

    text = (
        f"{directory}: {format_size(facts['bytes'])} read in {facts['seconds']:.1f} s, "
        f"{format_size(facts['bytes_per_s'])}/s; {len(faults) or 'nothing'} bad"
    )
    if kept.n_recorded:
        return f"{text}; hashes of {kept.n_recorded} files kept for next time"
    n_only_read = kept.n_uncompared_bytes
    if not n_only_read:
        return f"{text}; every byte was compared with a hash"
    keep = "--record keeps hashes to compare with next time"
    if n_only_read == facts["bytes"]:
        sound = "" if faults else ": headers, ranges and sizes are right, every byte can be read"
        return f"{text}; no byte was compared, for there are no hashes of it{sound} ({keep})"
    names = ", ".join(shard.name for shard in kept.uncompared[:NAMES_MAX])
    if len(kept.uncompared) > NAMES_MAX:
        names += f" and {len(kept.uncompared) - NAMES_MAX} more"
    return (
        f"{text}; {format_size(facts['bytes'] - n_only_read)} were compared with hashes, "
        f"{format_size(n_only_read)} only read: {names} ({keep})"
    )
