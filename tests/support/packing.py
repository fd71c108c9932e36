"""Packs for tests: `headrace pack` in this process, trees compared, kills at any system call."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import headrace
from protocol.files.checkpoint import Checkpoint

# What a run does to the disk, in Python's words; each call is a moment at which it can be killed.
DISK_CALLS = (
    "pwritev", "write", "fsync", "rename", "replace", "link", "symlink", "mkdir", "unlink",
    "ftruncate", "chmod",
)  # fmt: skip


class Outcome(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def events(self) -> list[dict[str, Any]]:
        """The JSON objects of standard output."""
        return [json.loads(line) for line in self.out.splitlines()]


def run_command(*arguments: str | Path) -> Outcome:
    """Run `headrace ARGUMENTS` in this process."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = headrace.main([str(argument) for argument in arguments])
    return Outcome(status, out.getvalue(), err.getvalue())


def pack(source: Path, target: Path, *flags: str | Path) -> Outcome:
    """Pack, and insist on success."""
    outcome = run_command("pack", source, target, *flags)
    assert outcome.status == 0, outcome.err
    return outcome


def slot_bytes(checkpoint: Checkpoint, layer: int, expert: int, *, mirror: bool = False) -> bytes:
    """Read one expert's slot image through the slice map, what is not read being zero."""
    slice_map = checkpoint.slice_map
    slot = bytearray(slice_map.layouts[layer].image.slot_bytes)
    slices = slice_map.mirror_slices if mirror else slice_map.slices
    for part in slices(layer, expert):
        with part.shard.path.open("rb") as file:
            file.seek(part.offset)
            data = file.read(part.n_bytes)
        assert len(data) == part.n_bytes
        slot[part.slot_offset : part.slot_offset + part.n_bytes] = data
    return bytes(slot)


def keys(checkpoint: Checkpoint) -> Iterator[tuple[int, int]]:
    """Every (layer, expert)."""
    config = checkpoint.config
    return ((layer, e) for layer in range(config.n_layers) for e in range(config.n_experts))


def tree(directory: Path) -> dict[str, str]:
    """Relative path -> hash of the content, of every file below a directory."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def flip_bit(path: Path, offset: int) -> None:
    """Change one bit of a file, whatever its permissions."""
    with path.open("rb") as file:
        file.seek(offset)
        byte = file.read(1)[0]
    mode = path.stat().st_mode
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes([byte ^ 16]))
    path.chmod(mode)


def run_until_killed(arguments: list[str], n_calls: int, *, tear: bool = False) -> bool:
    """Run a command in a child that is killed -9 at its `n_calls`-th call of DISK_CALLS.

    `tear` lets the last write do half of its work. Returns whether it was killed; fails where it
    ended by itself with an error.
    """
    child = os.fork()
    if child == 0:
        _run_as_child(arguments, n_calls, tear=tear)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, f"headrace {arguments} ended with {status}"
    return False


def _run_as_child(arguments: list[str], n_calls: int, *, tear: bool) -> None:
    status = 70
    try:
        left = [n_calls]
        for name in DISK_CALLS:
            setattr(os, name, _deadly(getattr(os, name), name, left, tear=tear))
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        status = headrace.main(arguments)
    finally:
        sys.stdout.flush()
        os._exit(status)


def _deadly(call: Any, name: str, left: list[int], *, tear: bool) -> Any:
    def counted(*arguments: Any, **more: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            if tear and name == "pwritev":
                descriptor, views, offset = arguments
                half = len(views[0]) // 2 // 4096 * 4096  # an aligned part, as a drive would
                if half:
                    call(descriptor, [views[0][:half]], offset)
            elif tear and name == "write":
                descriptor, data = arguments
                call(descriptor, bytes(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **more)

    return counted
