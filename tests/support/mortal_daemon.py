"""An `ArenaDaemon` that dies where it is told to, and whose successor's arena holds other bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.arena.layout import ArenaView
from protocol.errors import DaemonLost
from protocol.files.checkpoint import Checkpoint

from .arena_daemon import ArenaDaemon


class MortalDaemon(ArenaDaemon):
    """`dies_in` names the call that finds it dead, once; then `reconnect` finds its successor.

    new_arena  whether the successor has an arena of its own; else the same one. Either begins
               empty, and what lay in the old one's slots is overwritten.
    """

    def __init__(self, checkpoint: Checkpoint, n_slots: int, *, new_arena: bool = False) -> None:
        super().__init__(checkpoint, n_slots)
        self.dies_in = ""
        self.new_arena = new_arena
        self.n_absent = 0  # reconnects that find nobody

    def _calls(self, name: str) -> None:
        if name == self.dies_in and not self.lost:
            self.dies_in, self.lost = "", "was killed"
            self.events.append("lost")
            self._rows.clear()
        if self.lost:
            raise DaemonLost(f"{name}: it {self.lost}")

    def reconnect(self, timeout_ms: int) -> None:
        """Find the successor."""
        if self.n_absent:
            self.n_absent -= 1
            raise DaemonLost("nobody answers")
        self._memory[self.layout.offset("slots") :] = 0x7F
        if self.new_arena:
            self._memory = _whole_pages(self.layout.n_bytes)
            self.arena = ArenaView(self._memory.data, self.layout)
        self.table[:] = -1
        self._owner = [None] * self.n_slots
        self._changed.clear()
        self._pushed.clear()
        self.lost = ""
        self.welcome = self._welcome()
        if self.new_arena:
            object.__setattr__(self.welcome, "arena_id", b"b" * 16)
        self.events.append("resync")

    def miss(self, layer: int, experts: Sequence[int], **more: Any) -> Any:
        """As ArenaDaemon's; in "answer" it dies once the request has left."""
        self._calls("miss")
        if self.dies_in == "answer":
            more["meanwhile"]()
            self._calls("answer")
        return super().miss(layer, experts, **more)

    def changes(self) -> list[Any]:
        """As ArenaDaemon's."""
        self._calls("changes")
        return super().changes()

    def ack(self, applied: int) -> None:
        """As ArenaDaemon's."""
        self._calls("ack")
        super().ack(applied)

    def touch(self, step: int, picks: NDArray[Any]) -> None:
        """Never raises: it finds out, as a send does that is of no consequence."""
        if self.dies_in == "touch":
            self.dies_in, self.lost = "", "was killed"
            self.events.append("lost")
        if not self.lost:
            super().touch(step, picks)

    def request_rows(self, table: int, rows: NDArray[Any], others: Sequence[Any] = ()) -> int:
        """As ArenaDaemon's."""
        self._calls("request_rows")
        return super().request_rows(table, rows, others)

    def take_rows(self, handle: int) -> NDArray[np.uint8]:
        """As ArenaDaemon's; noted, for rows that are late."""
        self.events.append("take")
        self._calls("take_rows")
        return super().take_rows(handle)


def _whole_pages(n_bytes: int) -> NDArray[np.uint8]:
    whole = np.zeros(n_bytes + 8192, np.uint8)
    start = -whole.ctypes.data % 4096
    return whole[start : start + n_bytes]
