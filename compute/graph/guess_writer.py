"""The file of `--predict-trace`: each token's picks and what earlier layers' inputs foretold.

A block is one write at the file's end, under a lock: a process that dies leaves at most one torn
block, which its successor cuts off. A disk that fails costs the rest of the file, and no token.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ConfigError
from protocol.files.guess_format import (
    HEADER_BYTES,
    MAGIC,
    NO_EXPERT,
    GuessShape,
    decode_blocks,
    decode_header,
    encode_block,
    encode_header,
)

_LOG = logging.getLogger("headrace.graph")
MAX_BYTES = 1 << 30
MOST_WAITING = 64  # tokens that are not written yet
FLUSH_S = 0.5


class GuessWriter:
    """Appends to `path`; goes on in a file of the same model, after its last whole block."""

    def __init__(self, path: Path, shape: GuessShape, *, max_bytes: int = MAX_BYTES) -> None:
        """Begin or go on. Raises ConfigError where the file is another or cannot be written."""
        self.path = path
        self.n_distances = shape.n_distances
        self._shape = shape
        self._max_bytes = max_bytes
        self._waiting: list[NDArray[np.void]] = []
        self._written_at = time.monotonic()
        self._works = True
        try:
            self._begin()
        except OSError as error:
            raise ConfigError(f"--predict-trace {path}: {error.strerror}") from error

    def take(self, position: int, picks: NDArray[np.int64], guesses: NDArray[np.int32]) -> None:
        """Take a token's picks [n_layers, top_k] and guesses [n_layers, n_distances, top_k].

        Guesses of -1 are none. It is written within half a second of tokens, or by `flush`.
        """
        record = np.zeros(1, self._shape.record)
        record["position"] = position
        record["picks"] = picks
        record["guesses"] = np.where(guesses < 0, NO_EXPERT, guesses)
        self._waiting.append(record)
        if len(self._waiting) >= MOST_WAITING or time.monotonic() - self._written_at >= FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write what was taken. A failure is said once, and nothing is written any more."""
        waiting, self._waiting = self._waiting, []
        self._written_at = time.monotonic()
        if not waiting or not self._works:
            return
        try:
            self._append(encode_block(np.concatenate(waiting)))
        except OSError as error:
            self._works = False
            _LOG.warning("%s: %s; nothing more is recorded", self.path, error.strerror)

    def _begin(self) -> None:
        descriptor = self._open()
        try:
            data = self.path.read_bytes()
            if len(data) < HEADER_BYTES and MAGIC.startswith(data[: len(MAGIC)]):
                os.ftruncate(descriptor, 0)
                _write(descriptor, encode_header(self._shape, time.time_ns() // 1_000_000))
                return
            shape = decode_header(data, f"--predict-trace {self.path}")
            if shape != self._shape:
                raise ConfigError(f"--predict-trace {self.path}: it is of another model")
            os.ftruncate(descriptor, decode_blocks(data, shape).end)
        finally:
            os.close(descriptor)

    def _append(self, block: bytes) -> None:
        descriptor = self._open()
        try:
            size = os.fstat(descriptor).st_size
            if size + len(block) > self._max_bytes:
                self._works = False
                _LOG.warning("%s: %d bytes are the limit", self.path, self._max_bytes)
                return
            try:
                _write(descriptor, block)
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        """Open the file and lock it, until it is closed."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(self.path, flags, 0o600)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise ConfigError(f"--predict-trace {self.path}: not a plain file")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return descriptor


def _write(descriptor: int, data: bytes) -> None:
    n = 0
    while n < len(data):
        n += os.write(descriptor, data[n:])
