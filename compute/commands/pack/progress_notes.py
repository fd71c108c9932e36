"""What an unfinished pack keeps of itself, in `.pack/`: its plan, its source, what is finished.

Invariants: one process at a time (a lock that ends with it). The notes exist from before the first
byte of output until after the manifest; a directory with both is finished. `state.json` is written
once and whole; `done.jsonl` grows by whole lines, a torn last one is left out.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict

from protocol.errors import ConfigError, ShardError
from protocol.files.pack_manifest import (
    MANIFEST_NAME,
    WORK_NAME,
    Manifest,
    PackFile,
    SourceFile,
    read_manifest,
)

from .part_file import sync_directory, write_atomically, write_error
from .plan import PackPlan
from .source_files import changed

STATE_NAME = "state.json"
DONE_NAME = "done.jsonl"
LOCK_NAME = "lock"
PACK_ID = "pack_id"  # the last one of a plan's texts


class ProgressNotes:
    """The notes of one pack directory, made or taken up; hold them while anything is written."""

    def __init__(self, plan: PackPlan) -> None:
        """Take the lock; raises ConfigError where another pack runs, or another one was begun."""
        self._home = plan.options.target
        self.directory = self._home / WORK_NAME
        self.done: dict[tuple[str, str], PackFile] = {}  # by place and name
        self.is_resumed = False
        try:
            self.directory.mkdir(exist_ok=True)
            self._lock = os.open(
                self.directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
        except OSError as error:
            raise write_error(self.directory, error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ConfigError(f"{self._home}: another headrace pack is writing here") from None
        try:
            self._take_up(plan)
            self._log = self._open_log()
        except BaseException:
            os.close(self._lock)
            raise

    def note(self, files: Iterable[PackFile]) -> None:
        """Note finished files, durably."""
        files = list(files)
        lines = "".join(json.dumps(asdict(file)) + "\n" for file in files)
        view = memoryview(lines.encode())
        try:
            while view:
                view = view[os.write(self._log, view) :]
            os.fsync(self._log)
        except OSError as error:
            raise write_error(self.directory / DONE_NAME, error) from error
        self.done |= {(file.place, file.name): file for file in files}

    def close(self) -> None:
        """Let go of the lock; the notes stay for next time."""
        os.close(self._log)
        os.close(self._lock)

    def remove(self) -> None:
        """Delete the notes: the manifest is there."""
        self.close()
        shutil.rmtree(self.directory)
        sync_directory(self._home)

    def _take_up(self, plan: PackPlan) -> None:
        """Compare with what was begun here, or begin."""
        path = self.directory / STATE_NAME
        text = _plan_text(plan)
        if (self._home / MANIFEST_NAME).exists():
            self._take_manifest(plan, read_manifest(self._home))
        if path.exists():
            self.is_resumed = True
            state = json.loads(path.read_bytes())
            source = tuple(SourceFile(**row) for row in state["source"])
            _check_same(plan, state["plan"], source, "since the pack was begun")
            return
        state = {"plan": text, "source": [asdict(stamp) for stamp in plan.stamps]}
        write_atomically(path, (json.dumps(state, indent=1) + "\n").encode())
        sync_directory(self._home)

    def _open_log(self) -> int:
        """Open the list of finished files; what follows its last whole line is cut off."""
        path = self.directory / DONE_NAME
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        files, end = _read_done(path.read_bytes())
        os.ftruncate(log, end)
        self.done |= {(file.place, file.name): file for file in files}
        return log

    def _take_manifest(self, plan: PackPlan, manifest: Manifest) -> None:
        """Count the files of a finished pack, or share of one, as done."""
        check_manifest(plan, manifest)
        self.done |= {(file.place, file.name): file for file in manifest.files}


def check_manifest(plan: PackPlan, manifest: Manifest) -> None:
    """Raise ConfigError on another pack's manifest, ShardError where the source has changed."""
    _check_same(plan, _manifest_text(manifest), manifest.source, "since it was packed")


def check_same_source(plan: PackPlan, before: tuple[SourceFile, ...], since: str) -> None:
    """Raise ShardError where a file of the source is no longer what it was."""
    difference = changed(before, plan.stamps)
    if difference:
        raise ShardError(
            f"{plan.checkpoint.path}: changed {since}: {difference}; restore it, or pack into "
            "another directory"
        )


def _check_same(
    plan: PackPlan, before: dict[str, object], source: tuple[SourceFile, ...], since: str
) -> None:
    """Compare settings, then the source, then what both together amount to."""
    now, home = _plan_text(plan), plan.options.target
    for name in now:
        if name == PACK_ID:
            check_same_source(plan, source, since)
        if before.get(name) != now[name]:
            raise ConfigError(
                f"{home}: holds a pack with {name} {before.get(name)!r}, now wanted {now[name]!r}; "
                "give the same, or another directory"
            )


def _plan_text(plan: PackPlan) -> dict[str, object]:
    stripes, mirror = plan.place_texts()
    return {
        "experts": plan.options.experts,
        "engram": plan.options.engram,
        "stripes": list(stripes),
        "mirror": mirror,
        PACK_ID: plan.pack_id.hex(),
    }


def _manifest_text(manifest: Manifest) -> dict[str, object]:
    return {
        "experts": manifest.experts,
        "engram": manifest.engram,
        "stripes": list(manifest.stripes),
        "mirror": manifest.mirror,
        PACK_ID: manifest.pack_id.hex(),
    }


def _read_done(data: bytes) -> tuple[list[PackFile], int]:
    """Return the files of the whole lines, and where the last of those lines ends."""
    files: list[PackFile] = []
    end = 0
    for line in data.splitlines(keepends=True):
        try:
            files.append(PackFile(**json.loads(line)))
        except (TypeError, ValueError):
            break
        if not line.endswith(b"\n"):
            files.pop()
            break
        end += len(line)
    return files, end
