"""Which files of an earlier run are still what it wrote, so that they need not be written again.

Compared are the size, of record files header and index, of small files the content, and the time
of the last write. Only a file that was written to since is read whole and held to its hash: to
read everything again would take as long as to pack. A change that keeps size and time is left to
`headrace verify`.
"""

from __future__ import annotations

from collections.abc import Callable

from compute.commands.directory_checks import record_check, whole_file_check
from compute.commands.file_checks import CheckedFile, FileChecks
from protocol.errors import ShardError
from protocol.files.pack_manifest import Manifest

from .plan import PackPlan
from .progress_notes import Done, DoneFile
from .source_files import COPIED_BYTES_MAX


def unchanged(
    plan: PackPlan, done: Done, manifest: Manifest, jobs: int, say: Callable[[str], None]
) -> set[tuple[str, str]]:
    """Return place and name of the files that stay; a line says which ones do not."""
    kept: set[tuple[str, str]] = set()
    unsure: dict[tuple[str, str], CheckedFile] = {}
    for key, one in done.items():
        try:
            check = _check(plan, one, manifest)
        except ShardError as error:
            say(f"{error}: it is written again")
            continue
        if _needs_reading(plan, one):
            unsure[key] = check
        else:
            kept.add(key)
    faults = FileChecks(list(unsure.values()), lambda _: None).run(jobs) if unsure else []
    bad = {fault.path for fault in faults}
    for path in sorted(bad):
        say(f"{path}: was changed since it was finished: it is written again")
    return kept | {key for key, check in unsure.items() if check.shard.path not in bad}


def _check(plan: PackPlan, one: DoneFile, manifest: Manifest) -> CheckedFile:
    """The check of the whole file; raises ShardError where it shows without one that it is bad."""
    path = plan.directory(one.file.place) / one.file.name
    if one.file.kind == "experts":
        return record_check(path, one.file, manifest)
    return whole_file_check(path, one.file)


def _needs_reading(plan: PackPlan, one: DoneFile) -> bool:
    path = plan.directory(one.file.place) / one.file.name
    is_small = one.file.kind == "copied" and one.file.n_bytes <= COPIED_BYTES_MAX
    return is_small or path.stat().st_mtime_ns > one.mtime_ns
