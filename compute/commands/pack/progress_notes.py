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
from dataclasses import asdict, dataclass
from pathlib import Path

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


@dataclass(frozen=True, slots=True)
class DoneFile:
    """A file that an earlier run finished, and when it was last written to."""

    file: PackFile
    mtime_ns: int  # at most this, as far as is known


Done = dict[tuple[str, str], DoneFile]  # by place and name


class ProgressNotes:
    """The notes of one pack directory, made or taken up; hold them while anything is written."""

    def __init__(self, plan: PackPlan) -> None:
        """Take the lock; raises ConfigError where another pack runs, or another one was begun."""
        self._plan = plan
        self._home = plan.options.target
        self.directory = self._home / WORK_NAME
        self.done: Done = {}
        self.is_resumed = False
        try:
            self.directory.mkdir(exist_ok=True)
            self._lock = os.open(
                self.directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
        except OSError as error:
            raise write_error(self.directory, error) from error
        try:
            _lock(self._lock, fcntl.LOCK_EX, self._home)
            self._take_up()
            self._log = self._open_log()
        except BaseException:
            os.close(self._lock)
            raise

    def note(self, files: Iterable[PackFile]) -> None:
        """Note finished files, durably."""
        done = [DoneFile(file, self._written_ns(file)) for file in files]
        rows = [asdict(one.file) | {"mtime_ns": one.mtime_ns} for one in done]
        view = memoryview("".join(json.dumps(row) + "\n" for row in rows).encode())
        try:
            while view:
                view = view[os.write(self._log, view) :]
            os.fsync(self._log)
        except OSError as error:
            raise write_error(self.directory / DONE_NAME, error) from error
        self.done |= _by_name(done)

    def close(self) -> None:
        """Let go of the lock; the notes stay for next time."""
        os.close(self._log)
        os.close(self._lock)

    def remove(self) -> None:
        """Delete the notes: the manifest is there."""
        self.close()
        shutil.rmtree(self.directory)
        sync_directory(self._home)

    def _take_up(self) -> None:
        """Compare with what was begun here, or begin."""
        begun = _begun(self._plan)
        self.done |= begun.done
        self.is_resumed = begun.is_resumed
        if begun.is_resumed:
            return
        stamps = [asdict(stamp) for stamp in self._plan.stamps]
        state = {"plan": _plan_text(self._plan), "source": stamps}
        path = self.directory / STATE_NAME
        write_atomically(path, (json.dumps(state, indent=1) + "\n").encode())
        sync_directory(self._home)

    def _open_log(self) -> int:
        """Open the list of finished files; what follows its last whole line is cut off."""
        path = self.directory / DONE_NAME
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.ftruncate(log, _read_done(path)[1])
        return log

    def _written_ns(self, file: PackFile) -> int:
        return (self._plan.directory(file.place) / file.name).stat().st_mtime_ns


def finished_before(plan: PackPlan) -> Done:
    """Return what an earlier run finished, touching nothing; raises what ProgressNotes would."""
    home = plan.options.target
    try:
        lock = os.open(home / WORK_NAME / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return _begun(plan).done
    try:
        _lock(lock, fcntl.LOCK_SH, home)
        return _begun(plan).done
    finally:
        os.close(lock)


@dataclass(frozen=True, slots=True)
class _Begun:
    done: Done
    is_resumed: bool


def _begun(plan: PackPlan) -> _Begun:
    """What notes and manifest say is there; raises where they are of another pack."""
    home = plan.options.target
    done: Done = {}
    if (home / MANIFEST_NAME).exists():
        done = manifest_files(plan, read_manifest(home))
    path = home / WORK_NAME / STATE_NAME
    if not path.exists():
        return _Begun(done, is_resumed=False)
    try:
        state = json.loads(path.read_bytes())
        before = dict(state["plan"])
        source = tuple(SourceFile(**row) for row in state["source"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{path}: is damaged, so that what was begun here cannot be gone on with; "
            "delete the directory, or give another one"
        ) from None
    _check_same(plan, before, source, "since the pack was begun")
    return _Begun(done | _by_name(_read_done(path.with_name(DONE_NAME))[0]), is_resumed=True)


def manifest_files(plan: PackPlan, manifest: Manifest) -> Done:
    """Return the files of a finished pack, or share of one; raises where it is another's."""
    check_manifest(plan, manifest)
    written_ns = (plan.options.target / MANIFEST_NAME).stat().st_mtime_ns
    return _by_name(DoneFile(file, written_ns) for file in manifest.files)


def _by_name(done: Iterable[DoneFile]) -> Done:
    return {(one.file.place, one.file.name): one for one in done}


def _lock(descriptor: int, kind: int, home: Path) -> None:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{home}: another headrace pack is writing here") from None


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


def _read_done(path: Path) -> tuple[list[DoneFile], int]:
    """Return the files of the whole lines, and where the last of those lines ends."""
    done: list[DoneFile] = []
    end = 0
    data = path.read_bytes() if path.exists() else b""
    for line in data.splitlines(keepends=True):
        try:
            row = json.loads(line)
            one = DoneFile(mtime_ns=row.pop("mtime_ns"), file=PackFile(**row))
        except (AttributeError, KeyError, TypeError, ValueError):
            break
        if not line.endswith(b"\n"):
            break
        done.append(one)
        end += len(line)
    return done, end
