"""The arena as a GPU reads it in place: page-locked by registration, in chunks of whole slots.

Owns the registrations. Invariants: a chunk is a whole number of slots, so no expert spans two; all
is unregistered before the mapping goes. On the CPU nothing needs registering.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.arena.layout import ArenaView
from protocol.errors import ConfigError

_CHUNK_BYTES = 4 << 30
_READ_ONLY = 0x08  # cudaHostRegisterReadOnly
_ALREADY = 712  # cudaErrorHostMemoryAlreadyRegistered


class RegisteredArena:
    """`starts()` gives the addresses of the slots, once registered."""

    def __init__(self, arena: ArenaView, n_slots: int, device: torch.device) -> None:
        self._layout = arena.layout
        # Holding its bytes keeps the mapping until it is unregistered, whatever the client does.
        self._memory = np.frombuffer(arena.memory, np.uint8)
        self._base = int(self._memory.ctypes.data) + arena.layout.offset("slots")
        self._device = device
        self._chunks: list[tuple[int, int]] = []
        self._register(n_slots)

    def starts(self) -> NDArray[np.int64]:
        """Return the address at which each slot that the arena may ever have begins."""
        ends = [self._layout.rooms.end(slot) for slot in range(self._layout.n_slots_max)]
        return self._base + np.array(ends, np.int64)

    def resize(self, n_slots: int) -> None:
        """Register what `n_slots` slots take, and nothing beyond; nothing may be running."""
        self.close()
        self._register(n_slots)

    def close(self) -> None:
        """Unregister everything; nothing may be running."""
        for start, _ in self._chunks:
            _check(_runtime().cudaHostUnregister(start), "cudaHostUnregister")
        self._chunks.clear()

    def _register(self, n_slots: int) -> None:
        if self._device.type != "cuda":
            return
        rooms, first = self._layout.rooms, 0
        for slot in range(n_slots):
            size = rooms.end(slot + 1) - rooms.end(first)
            if slot + 1 < n_slots and size < _CHUNK_BYTES:
                continue
            start = self._base + rooms.end(first)
            found = _runtime().cudaHostRegister(start, size, _READ_ONLY)
            _check(found, f"cudaHostRegister of {size} bytes of the arena")
            self._chunks.append((start, size))
            first = slot + 1


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check(result: object, what: str) -> None:
    code = int(result)  # type: ignore[call-overload]
    if code not in {0, _ALREADY}:
        raise ConfigError(f"{what} failed with CUDA error {code}")
