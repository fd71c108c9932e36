"""The public client of the expert daemon, for the engine and for other programs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import zmq
from numpy.typing import NDArray

from protocol.arena.attach import MappedArena
from protocol.arena.layout import ArenaView
from protocol.errors import ConfigError

from . import messages as m
from .connection import Connection, Deadline
from .engine_calls import EngineCalls
from .greeting import open_connection
from .limits import HELLO_MS, RESIZE_MS, STATS_MS
from .reader_calls import Lease, ReaderCalls, SlotView
from .records import KEY_RECORD
from .row_calls import RowCalls
from .sockets import RuntimePaths

__all__ = ["ExpertClient", "Lease", "SlotView"]


class ExpertClient(EngineCalls, ReaderCalls, RowCalls):
    """A session with the expert daemon: its experts as bytes in shared memory.

    runtime_dir  the daemon's, where its sockets are
    role         "reader" leases experts; "engine" (one at a time) opens write windows
    fingerprint  of the model, 16 bytes; a reader may leave it empty
    top_k_batch  the engine's top-k x batch
    hello_ms     how long to wait for the daemon, another engine included

    Raises DaemonLost where no daemon answers, DaemonBusy where another engine stays, ProtocolError
    where version, model or layout differ, ConfigError on a path that is too long. Every later wait
    has a deadline too. Use it from one thread at a time, and close it or use it in a `with`.

    Example, a program that adds up the bytes of two experts and reads two Engram rows:

        from protocol.wire.client import ExpertClient

        def show(runtime_dir: str) -> None:
            with ExpertClient(runtime_dir) as client:
                print(client.stats())
                print("in the arena:", len(client.keys()))
                with client.leased([(0, 1), (1, 3)], wait_ms=5000) as leases:
                    for lease in leases:
                        expert = client.slot_view(lease.slot)
                        n_bytes = len(expert.gate) + len(expert.up) + len(expert.down)
                        print(lease.layer, lease.expert, n_bytes, sum(expert.gate))
                # The leases were checked and released; the views must not be used any more.
                leases = client.fetch([(0, 2)])
                try:
                    down = bytes(client.slot_view(leases[0].slot).down)
                    client.check(leases[0])  # raises LeaseLost if `down` may be another's
                    print(len(down))
                finally:
                    client.release(leases)
                if client.max_rows:
                    print(client.rows(0, [5, 6]).shape)
    """

    def __init__(
        self,
        runtime_dir: str | os.PathLike[str],
        role: str = "reader",
        fingerprint: bytes = b"",
        top_k_batch: int = 0,
        hello_ms: float = HELLO_MS,
    ) -> None:
        super().__init__()
        if role not in m.ROLES:
            raise ConfigError(f"role {role!r}: wanted one of {', '.join(m.ROLES)}")
        self.role = role
        self._fingerprint = bytes(fingerprint)
        self.top_k_batch = int(top_k_batch)
        self._path: Path = RuntimePaths.within(runtime_dir).socket
        self._closed = False
        self._context = zmq.Context()
        try:
            self._connection = self._connect(b"", Deadline(hello_ms))
            self._map()
        except BaseException:
            self._context.term()
            raise

    def _connect(self, arena_id: bytes, deadline: Deadline) -> Connection:
        hello = m.Hello(
            version=m.PROTOCOL_VERSION,
            role=self.role,
            fingerprint=self._fingerprint,
            arena_id=arena_id,
            top_k_batch=self.top_k_batch,
            pid=os.getpid(),
        )
        return open_connection(self._context, self._path, hello, deadline)

    def _map(self) -> None:
        attached = self._connection.attached
        try:
            self._mapped = MappedArena(
                attached.descriptor, attached.identity, engine=self.role == "engine"
            )
        except BaseException:
            self._connection.close()
            raise
        if self.role == "engine":
            self._show_epochs()
            self._n_slots = self.welcome.n_slots

    @property
    def welcome(self) -> m.Welcome:
        """The daemon's last Welcome: counts, table, quota."""
        return self._connection.welcome

    @property
    def arena(self) -> ArenaView:
        """The arena, read-only but for the engine's pages."""
        return self._mapped.view

    @property
    def arena_descriptor(self) -> int:
        """The arena's descriptor, the client's to close; also while the daemon is lost.

        The engine's can be written to, and a restarted daemon can be given it.
        """
        return self._mapped.descriptor

    @property
    def lost(self) -> str:
        """Why the daemon is lost, as far as is known; empty while it is not."""
        return self._connection.lost

    def fileno(self) -> int:
        """The descriptor connection's number: readable means that the daemon is gone."""
        self._connection.check()
        return self._connection.attached.connection.fileno()

    def reconnect(
        self,
        timeout_ms: float = HELLO_MS,
        *,
        before_remap: Callable[[], None] | None = None,
    ) -> m.Welcome:
        """Say Hello again, after DaemonLost or at any time; raises as the constructor does.

        Where the daemon kept the arena its mapping stays as it is. Otherwise before_remap is called
        first: the engine drains its device and unregisters the old one there. Leases, row handles
        and `applied` are those of no session any more.
        """
        arena_id = self._mapped.identity.arena_id
        # No Bye: it would say that nothing of the engine's reads the arena any more.
        self._connection.end("was left for a new session")
        self._connection = self._connect(arena_id, Deadline(timeout_ms))
        self._begin_session()
        if self._connection.welcome.arena_id != arena_id:
            if before_remap is not None:
                before_remap()
            self._mapped.close()
            self._map()
        return self.welcome

    def keys(self) -> NDArray[np.void]:
        """What the arena holds: records with fields layer, expert, slot, ascending by key."""
        number = self._next_number()
        answer = self._ask(m.Keys(number), number, m.KeyList, STATS_MS)
        return np.frombuffer(answer.keys, KEY_RECORD)

    def stats(self) -> dict[str, Any]:
        """The daemon's counters and settings by name."""
        number = self._next_number()
        return dict(self._ask(m.Stats(number), number, m.StatList, STATS_MS).values)

    def unquarantine(self, keys: Iterable[tuple[int, int]]) -> str:
        """Have these (layer, expert) read again, their bytes taken as they are now.

        Returns how many were in quarantine, in words. Raises DaemonLost.
        """
        number = self._next_number()
        wanted = tuple(dict.fromkeys((int(layer), int(expert)) for layer, expert in keys))
        answer = self._ask(m.Unquarantine(number, wanted), number, m.Answered, STATS_MS)
        return answer.text

    def trace(self, path: str | os.PathLike[str] | None) -> str:
        """Have the daemon record each step's picks into this file from now on; None: no longer.

        The path is the daemon's, from / on. Returns what came of it, in words. Raises ConfigError
        where the file cannot be written, is no trace or its disk does not answer, and DaemonLost.
        """
        number = self._next_number()
        request = m.Trace(number, "" if path is None else os.fspath(path), path is not None)
        answer = self._ask(request, number, m.Answered, STATS_MS)
        if not answer.ok:
            raise ConfigError(answer.text)
        return answer.text

    def resize(self, n_bytes: int, timeout_ms: float = RESIZE_MS) -> m.Resized:
        """Have the arena made this large, as populated; its `text` says why where it is not.

        Takes as long as memory needs to be populated or given up, and the engine to its next
        step: not to be called by the engine itself. At the deadline the resize goes on, and its
        text says so. Raises DaemonLost.
        """
        number = self._next_number()
        request = m.Resize(number, int(n_bytes))
        answer: m.Resized
        answer, _ = self._settle(request, number, m.Resized, timeout_ms)
        return answer

    def ping(self, timeout_ms: float = STATS_MS) -> float:
        """Milliseconds until the daemon answered; raises DaemonLost where it did not."""
        number = self._next_number()
        deadline = Deadline(timeout_ms)
        self._ask(m.Ping(number), number, m.Pong, timeout_ms)
        return deadline.passed_ms

    def poll(self) -> None:
        """Take what has arrived and answer the daemon's Pings, without waiting."""
        self._drain()

    def close(self) -> None:
        """Say Bye and let go of everything. Never hangs, never raises; may be called twice.

        An engine's device must be drained before: then nothing of it reads the arena any more.
        """
        if not self._closed:
            self._closed = True
            self._connection.close()
            self._mapped.close()
            self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
