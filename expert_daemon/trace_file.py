"""Routing traces on disk: one file that grows, older parts beside it, and reading them back.

FILE is written; once it would grow beyond its limit it becomes FILE.1, FILE.1 becomes FILE.2, and
so on up to the first name that is free; the last is overwritten. A block is one write: a process
that dies leaves at most one torn block, which its successor cuts off before it goes on in the same
file. One that dies between two renames leaves a free name, which the next rotation fills.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import numpy as np

from protocol.errors import ConfigError
from protocol.files.block_file import losses
from protocol.files.plain_file import open_plain, read_first

from .routing_trace import RoutingTrace, TraceShape
from .trace_format import (
    HEADER_BYTES,
    MAGIC,
    Step,
    decode_blocks,
    decode_header,
    encode_blocks,
    encode_header,
)
from .trace_parts import MOST_PART_BYTES, find_parts, next_number, older_path, read_blocks

MAX_BYTES = 64 << 20
N_OLD_PARTS = 7


class TraceFile:
    """The file that is written, and its older parts. One thread uses it."""

    def __init__(
        self,
        path: Path,
        shape: TraceShape,
        *,
        max_bytes: int = MAX_BYTES,
        n_old_parts: int = N_OLD_PARTS,
    ) -> None:
        """Go on in `path` where it is a trace of the same model, else begin a new file.

        A trace of another model, or one that is full, becomes an older part. Raises ConfigError
        where `path` is something else, cannot be written, or is being written by another process.
        """
        self.path = path
        self.n_bytes = 0
        self._shape = shape
        self._max_bytes = max_bytes
        self._n_old_parts = n_old_parts
        self._part = 0
        if max_bytes > MOST_PART_BYTES:
            text = f"trace {path}: parts of {max_bytes} bytes, the most is {MOST_PART_BYTES}"
            raise ConfigError(text)
        self._descriptor = self._open()
        try:
            self._go_on()
        except OSError as error:
            os.close(self._descriptor)
            raise ConfigError(f"trace {path}: {error.strerror}") from error
        except BaseException:
            os.close(self._descriptor)
            raise

    def write(self, steps: list[Step]) -> None:
        """Append the steps, rotating before a block that would not fit. Raises OSError."""
        for block in encode_blocks(steps, self._shape, _now_ms()):
            if self.n_bytes > HEADER_BYTES and self.n_bytes + len(block) > self._max_bytes:
                self._rotate()
            self._append(block)

    def close(self) -> None:
        """Let the file go."""
        os.close(self._descriptor)

    def _open(self) -> int:
        where = f"trace {self.path}"
        descriptor = open_plain(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, where=where)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise ConfigError(f"{where}: another process writes it ({error.strerror})") from error
        return descriptor

    def _go_on(self) -> None:
        header = read_first(self._descriptor, HEADER_BYTES)
        if len(header) < HEADER_BYTES and MAGIC.startswith(header[: len(MAGIC)]):
            self._part = next_number(self.path)
            os.ftruncate(self._descriptor, 0)
            self._begin()
            return
        shape, self._part = decode_header(header, f"trace {self.path}")
        n_bytes = os.fstat(self._descriptor).st_size
        if shape != self._shape or n_bytes > max(self._max_bytes, MAX_BYTES):
            self._rotate()
            return
        self.n_bytes = decode_blocks(read_first(self._descriptor, n_bytes), shape).end
        os.ftruncate(self._descriptor, self.n_bytes)

    def _begin(self) -> None:
        self.n_bytes = 0
        self._append(encode_header(self._shape, self._part, _now_ms()))

    def _rotate(self) -> None:
        names = [self.path, *(older_path(self.path, n) for n in range(1, self._n_old_parts + 1))]
        free = next((n for n, name in enumerate(names) if not name.exists()), self._n_old_parts)
        for number in range(free, 0, -1):
            names[number - 1].replace(names[number])
        if self._n_old_parts == 0:
            self.path.unlink(missing_ok=True)
        full, self._descriptor = self._descriptor, self._open()
        os.close(full)
        self._part += 1
        self._begin()

    def _append(self, data: bytes) -> None:
        """Write all or nothing, unless the process dies in between."""
        try:
            n = 0
            while n < len(data):
                n += os.write(self._descriptor, data[n:])
        except OSError:
            os.ftruncate(self._descriptor, self.n_bytes)
            raise
        self.n_bytes += len(data)


def read_trace(path: Path) -> tuple[RoutingTrace, list[str]]:
    """Return a trace with its older parts, and what was left out of it, a line each.

    Raises ConfigError where `path` cannot be read or is no trace; `find_parts` says which older
    parts are left out.
    """
    parts, notes = find_parts(path)
    steps: list[Step] = []
    for part in parts:
        try:
            found = read_blocks(part)
        except ConfigError as error:
            if part is parts[-1]:
                raise
            notes.append(f"{error}: left out")
            continue
        notes += losses(part.path, found)
        steps += found.steps
    return _joined(parts[-1].shape, steps), notes


def write_trace(path: Path, trace: RoutingTrace) -> int:
    """Write a whole trace into one new file and return its bytes. Raises ConfigError."""
    steps = (
        Step(number, keys, is_token)
        for number, (keys, is_token) in enumerate(
            zip(trace.steps(), trace.is_token.tolist(), strict=True)
        )
    )
    try:
        with path.open("xb") as file:
            file.write(encode_header(trace.shape, 0, _now_ms()))
            file.writelines(encode_blocks(steps, trace.shape, _now_ms()))
            return file.tell()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _joined(shape: TraceShape, steps: list[Step]) -> RoutingTrace:
    keys = [step.keys for step in steps]
    lengths = np.array([len(one) for one in keys], np.int64)
    return RoutingTrace(
        shape,
        np.concatenate(keys) if keys else np.zeros(0, np.int64),
        np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        np.array([step.is_token for step in steps], np.bool_),
    )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
