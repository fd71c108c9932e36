"""Reads one file's header front to back, a window at a time, and never past a limit.

A length from the file is compared with what is left before a byte is read or allocated for it, so
memory is one window and what the caller keeps. Not thread-safe; the caller owns the descriptor.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from protocol.errors import ShardError

WINDOW_BYTES = 1 << 18
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Cursor:
    """A position in a file that moves forward only; every refusal names it."""

    def __init__(self, descriptor: int, path: Path, limit: int) -> None:
        self.path = path
        self.limit = limit  # the first byte that may not be read
        self._descriptor = descriptor
        self._window = b""
        self._start = 0  # file offset of the window
        self._at = 0  # position in the window

    @property
    def offset(self) -> int:
        """Position in the file."""
        return self._start + self._at

    @property
    def left(self) -> int:
        """Bytes up to the limit."""
        return self.limit - self.offset

    def refusal(self, what: str) -> ShardError:
        """Return the error for what stands at or before the position."""
        return ShardError(f"{self.path}: {what}, at byte {self.offset}")

    def take(self, n_bytes: int, what: str) -> bytes:
        """Return the next bytes; ShardError where fewer are left."""
        end = self._at + n_bytes
        if end <= len(self._window):
            data = self._window[self._at : end]
            self._at = end
            return data
        self._check_left(n_bytes, what)
        self._fill(n_bytes, what)
        self._at = n_bytes
        return self._window[:n_bytes]

    def skip(self, n_bytes: int, what: str) -> None:
        """Move past bytes without reading them."""
        self._check_left(n_bytes, what)
        end = self._at + n_bytes
        if end <= len(self._window):
            self._at = end
        else:
            self._start, self._window, self._at = self.offset + n_bytes, b"", 0

    def u32(self, what: str) -> int:
        """Return an unsigned 32-bit integer."""
        value: int = _U32.unpack(self.take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        """Return an unsigned 64-bit integer."""
        value: int = _U64.unpack(self.take(8, what))[0]
        return value

    def counted(self, what: str, most: int) -> bytes:
        """Return the bytes that a 64-bit length in front of them announces, at most `most`."""
        n_bytes = self.u64(what)
        if n_bytes > most:
            raise self.refusal(f"{what} has {n_bytes} bytes, wanted at most {most}")
        return self.take(n_bytes, what)

    def skip_strings(self, count: int, what: str) -> None:
        """Move past `count` strings, each behind its length."""
        unpack = _U64.unpack_from
        for _ in range(count):
            at = self._at
            if at + 8 > len(self._window):
                self.skip(self.u64(what), what)
                continue
            end = at + 8 + unpack(self._window, at)[0]
            if end <= len(self._window):
                self._at = end
            else:
                self._at = at + 8
                self.skip(end - at - 8, what)

    def _check_left(self, n_bytes: int, what: str) -> None:
        if n_bytes > self.left:
            raise self.refusal(f"{what} wants {n_bytes} more bytes, {max(self.left, 0)} are left")

    def _fill(self, n_bytes: int, what: str) -> None:
        """Move the window to the position, at least `n_bytes` long."""
        self._start, self._at = self.offset, 0
        wanted = min(max(n_bytes, WINDOW_BYTES), self.limit - self._start)
        parts: list[bytes] = []
        while wanted > 0:
            part = os.pread(self._descriptor, wanted, self._start + sum(map(len, parts)))
            if not part:
                break
            parts.append(part)
            wanted -= len(part)
        self._window = parts[0] if len(parts) == 1 else b"".join(parts)
        if len(self._window) < n_bytes:
            raise self.refusal(f"the file ends inside {what}")
