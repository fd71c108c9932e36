"""The arena as a GPU reads it in place: page-locked by registration, chunk after chunk.

Owns the registrations and the thread that makes them: 100 GiB take some 14 s, and meanwhile prompts
are computed from copies. Invariants: a chunk is a whole number of slots, so no expert spans two; a
slot is `ready` only while its chunk is registered; all is unregistered before the mapping goes.
`ready` is read, and everything here called, by the engine's thread. On the CPU nothing needs
registering. Source: DESIGN.md, section 2.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.arena.layout import ArenaView
from protocol.errors import ConfigError

WAIT_S = 60.0  # for one chunk, which takes some 0.15 s
CHUNK_BYTES = 1 << 30  # at least, of a whole number of huge pages
_READ_ONLY = 0x08  # cudaHostRegisterReadOnly
_ALREADY = 712  # cudaErrorHostMemoryAlreadyRegistered
_NOT_SUPPORTED = 801  # cudaErrorNotSupported, as documented of a device without read-only memory
_LOG = logging.getLogger("headrace.compute")


class Registrar(Protocol):
    """Page-locks memory; called by one thread at a time. Raises ConfigError."""

    def register(self, start: int, n_bytes: int) -> None:
        """Lock these bytes and map them for the device."""
        ...

    def unregister(self, start: int) -> None:
        """Undo it."""
        ...


class CudaRegistrar:
    """Registers with the CUDA runtime, for reading alone where the device can."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flags = _READ_ONLY

    def register(self, start: int, n_bytes: int) -> None:
        """Lock these bytes and map them for the device."""
        with torch.cuda.device(self._device):
            found = int(_runtime().cudaHostRegister(start, n_bytes, self._flags))
            if found == _NOT_SUPPORTED and self._flags:
                _LOG.warning(
                    "%s registers nothing as read-only: the arena goes without", self._device
                )
                self._flags = 0
                found = int(_runtime().cudaHostRegister(start, n_bytes, self._flags))
        _check(found, f"cudaHostRegister of {n_bytes} bytes of the arena")

    def unregister(self, start: int) -> None:
        """Undo it."""
        _check(_runtime().cudaHostUnregister(start), "cudaHostUnregister")


@dataclass(slots=True, eq=False)
class _Chunk:
    first: int  # slot
    end: int
    state: str = "waiting"  # then "registering", then "ready"


class RegisteredArena:
    """`ready[slot]` says whether the device may read a slot, `starts()` where it begins.

    registrar  None: of the device, none on the CPU
    """

    def __init__(
        self,
        arena: ArenaView,
        n_slots: int,
        device: torch.device,
        registrar: Registrar | None = None,
    ) -> None:
        self._rooms = arena.layout.rooms
        self._n_max = arena.layout.n_slots_max
        # Holding its bytes keeps the mapping until it is unregistered, whatever the client does.
        self._memory = np.frombuffer(arena.memory, np.uint8)
        self._base = int(self._memory.ctypes.data) + arena.layout.offset("slots")
        if registrar is None and device.type == "cuda":
            registrar = CudaRegistrar(device)
        self._registrar = registrar
        self.ready = np.full(self._n_max, registrar is None)
        self.waited_s = 0.0
        self._chunks: list[_Chunk] = []
        self._changed = threading.Condition()
        self._wanted: list[int] = []  # slots that somebody waits for
        self._has_news = False
        self._failure: ConfigError | None = None
        self._thread: threading.Thread | None = None
        self._add(0, n_slots)

    def starts(self) -> NDArray[np.int64]:
        """Return the address at which each slot that the arena may ever have begins."""
        ends = [self._rooms.end(slot) for slot in range(self._n_max)]
        return self._base + np.array(ends, np.int64)

    def take_news(self) -> bool:
        """Whether `ready` has changed since the last call. Raises ConfigError where one failed."""
        if self._failure is not None:
            raise self._failure
        if not self._has_news:
            return False
        with self._changed:  # with the lock, so that what is new is there by now
            self._has_news = False
        return True

    def wait_for(self, slots: Iterable[int]) -> None:
        """Have the chunks of these slots registered next, and wait. Raises ConfigError."""
        missing = [slot for slot in slots if slot >= 0 and not self.ready[slot]]
        if not missing:
            return
        began = time.perf_counter()
        with self._changed:
            self._wanted = missing
            while not all(self.ready[slot] for slot in missing):
                if self._failure is not None:
                    raise self._failure
                self._start()
                assert self._thread is not None, f"slots {missing} are beyond the arena"
                self._await()
            self._wanted = []
        self.waited_s += time.perf_counter() - began

    def resize(self, n_slots: int) -> None:
        """Let go of what lies beyond `n_slots`, begin to register what is new up to there.

        Other chunks stay as they are. Nothing may be running.
        """
        if self._registrar is None:
            return
        with self._changed:
            for chunk in [chunk for chunk in self._chunks if chunk.end > n_slots]:
                self._let_go(chunk)
                self._chunks.remove(chunk)
            end = max((chunk.end for chunk in self._chunks), default=0)
        self._add(end, n_slots)

    def close(self) -> None:
        """Unregister everything; nothing may be running."""
        with self._changed:
            for chunk in self._chunks:
                if chunk.state == "waiting":
                    chunk.state = "dropped"
            for chunk in self._chunks:
                self._let_go(chunk)
            self._chunks.clear()

    def _await(self) -> None:
        """Wait for a chunk that is being registered. Raises ConfigError after WAIT_S."""
        if not self._changed.wait(WAIT_S):
            raise ConfigError(f"page-locking the arena: a chunk took more than {WAIT_S:g} s")

    def _let_go(self, chunk: _Chunk) -> None:
        """Unregister a chunk; one that is just being registered is waited for first."""
        while chunk.state == "registering":
            self._await()
        if chunk.state == "ready":
            assert self._registrar is not None
            self._registrar.unregister(self._base + self._rooms.end(chunk.first))
        chunk.state = "dropped"
        self.ready[chunk.first : chunk.end] = False
        self._has_news = True

    def _add(self, first: int, end: int) -> None:
        """Begin to register these slots."""
        if self._registrar is None:
            return
        step = self._rooms.chunk_slots
        while self._rooms.end(step) < CHUNK_BYTES and step < end:
            step += self._rooms.chunk_slots
        with self._changed:
            while first < end:
                until = min(end, (first // step + 1) * step)
                self._chunks.append(_Chunk(first, until))
                first = until
            self._start()

    def _start(self) -> None:
        waits = any(chunk.state == "waiting" for chunk in self._chunks)
        if self._thread is None and waits and self._failure is None:
            self._thread = threading.Thread(target=self._run, name="register", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                chunk = self._next()
                if chunk is None:
                    self._thread = None
                    return
                chunk.state = "registering"
            start = self._rooms.end(chunk.first)
            failure = None
            try:
                assert self._registrar is not None
                self._registrar.register(self._base + start, self._rooms.end(chunk.end) - start)
            except ConfigError as error:
                failure = error
            with self._changed:
                self._has_news = True
                if failure is None:
                    chunk.state = "ready"
                    self.ready[chunk.first : chunk.end] = True
                else:
                    chunk.state = "dropped"
                    self._failure = failure
                self._changed.notify_all()

    def _next(self) -> _Chunk | None:
        """The chunk of a slot that is waited for, else the first one."""
        if self._failure is not None:
            return None
        waiting = [chunk for chunk in self._chunks if chunk.state == "waiting"]
        for chunk in waiting:
            if any(chunk.first <= slot < chunk.end for slot in self._wanted):
                return chunk
        return waiting[0] if waiting else None


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check(result: object, what: str) -> None:
    code = int(result)  # type: ignore[call-overload]
    if code not in {0, _ALREADY}:
        raise ConfigError(f"{what} failed with CUDA error {code}")
