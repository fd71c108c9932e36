"""Routing traces on disk: one file that grows, older parts beside it, and reading them back.

FILE is written; once it would grow beyond its limit it becomes FILE.1, FILE.1 becomes FILE.2, and
so on; parts beyond the last are deleted. A block is one write: a process that dies leaves at most
one torn block, which its successor cuts off before it goes on in the same file.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

from protocol.errors import ConfigError
from protocol.files.block_file import losses

from .routing_trace import RoutingTrace, TraceShape
from .trace_format import (
    HEADER_BYTES,
    MAGIC,
    Found,
    Step,
    decode_blocks,
    decode_header,
    encode_blocks,
    encode_header,
)

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

        A trace of another model becomes an older part. Raises ConfigError where `path` is
        something else, cannot be written, or is being written by another process.
        """
        self.path = path
        self.n_bytes = 0
        self._shape = shape
        self._max_bytes = max_bytes
        self._n_old_parts = n_old_parts
        self._part = 0
        self._descriptor = self._open()
        try:
            self._go_on()
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
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            descriptor = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise ConfigError(f"trace {self.path}: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise ConfigError(f"trace {self.path}: not a plain file")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            text = f"trace {self.path}: another process writes it ({error.strerror})"
            raise ConfigError(text) from error
        return descriptor

    def _go_on(self) -> None:
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise ConfigError(f"trace {self.path}: {error.strerror}") from error
        if len(data) < HEADER_BYTES and MAGIC.startswith(data[: len(MAGIC)]):
            os.ftruncate(self._descriptor, 0)
            self._begin()
            return
        shape, self._part = decode_header(data, f"trace {self.path}")
        if shape != self._shape:
            self._rotate()
            return
        self.n_bytes = decode_blocks(data, shape).end
        os.ftruncate(self._descriptor, self.n_bytes)

    def _begin(self) -> None:
        self.n_bytes = 0
        self._append(encode_header(self._shape, self._part, _now_ms()))

    def _rotate(self) -> None:
        parts = [self.path, *(_older(self.path, n) for n in range(1, self._n_old_parts + 1))]
        for newer, older in reversed(list(pairwise(parts))):
            if newer.exists():
                newer.replace(older)
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


def trace_parts(path: Path) -> list[Path]:
    """The files of a trace, the oldest first, `path` itself last."""
    parts = [path]
    while (older := _older(path, len(parts))).exists():
        parts.append(older)
    return parts[::-1]


def read_trace(path: Path) -> tuple[RoutingTrace, list[str]]:
    """Return a trace with its older parts, and what was left out of it, a line each.

    Raises ConfigError where `path` cannot be read or is no trace. An older part of another model,
    or one that is damaged throughout, is left out with all parts before it.
    """
    shape, found = _read_part(path)
    parts = [found]
    notes = losses(path, found)
    for older in trace_parts(path)[-2::-1]:
        try:
            other, found = _read_part(older)
        except ConfigError as error:
            notes.append(f"{error}: left out, and what is older")
            break
        if other != shape:
            notes.append(f"{older}: of another model: left out, and what is older")
            break
        parts.append(found)
        notes += losses(older, found)
    return _joined(shape, [step for part in reversed(parts) for step in part.steps]), notes


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


def _read_part(path: Path) -> tuple[TraceShape, Found]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    shape, _ = decode_header(data, str(path))
    return shape, decode_blocks(data, shape)


def _joined(shape: TraceShape, steps: list[Step]) -> RoutingTrace:
    keys = [step.keys for step in steps]
    lengths = np.array([len(one) for one in keys], np.int64)
    return RoutingTrace(
        shape,
        np.concatenate(keys) if keys else np.zeros(0, np.int64),
        np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        np.array([step.is_token for step in steps], np.bool_),
    )


def _older(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
