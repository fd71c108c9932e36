"""Slots hashed again in the background, after somebody may have written to them.

An engine that died without a word may have done so because its device ran wild; what it could
reach is not believed before it was hashed. Experts serve meanwhile: waiting would cost more than
the rare bad byte, and a slot whose bytes are wrong is given up as soon as that is known.

`begin`, `drain` and `close` are called on the loop's thread. The hashing runs on a thread of its
own, which lets the interpreter lock go, and rests as long as it works.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from .checksums import slot_checksum
from .source import Bytes

SlotOf = Callable[[int], Bytes]
Pieces = Sequence[Sequence[tuple[int, int]]]  # each layer's pieces: (slot offset, bytes)


@dataclass(frozen=True, slots=True)
class _Suspect:
    layer: int
    expert: int
    slot: int
    generation: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Finding:
    """What a slot's hash says, if the slot still is what it was."""

    layer: int
    expert: int
    slot: int
    generation: int  # of the slot when its hash began
    is_good: bool


class Rehash:
    """Hashes what it is given, one slot after the other."""

    def __init__(
        self, headers: NDArray[Any], slot_of: SlotOf, pieces: Pieces, wake: Callable[[], None]
    ) -> None:
        self._headers = headers
        self._slot_of = slot_of
        self._pieces = pieces
        self._wake = wake
        self._lock = threading.Lock()  # of the three below
        self._waiting: deque[_Suspect] = deque()
        self._round = 0  # raised by each `begin`: what an earlier one found is void
        self._runs = False
        self._findings: deque[tuple[int, Finding]] = deque()
        self._thread: threading.Thread | None = None

    @property
    def n_waiting(self) -> int:
        """Slots still to be hashed."""
        return len(self._waiting)

    def begin(self, resident: Iterable[tuple[int, int, int]]) -> None:
        """Hash these READY (layer, expert, slot), in place of what still waits."""
        # Their headers as they are now: later ones may be those of another key.
        generations, checksums = self._headers["generation"], self._headers["checksum"]
        suspects = [
            _Suspect(layer, expert, slot, int(generations[slot]), int(checksums[slot]))
            for layer, expert, slot in resident
        ]
        with self._lock:
            self._round += 1
            self._waiting.clear()
            self._waiting.extend(suspects)
            if not self._waiting or self._runs:
                return
            self._runs = True
        self._thread = threading.Thread(target=self._run, name="rehash", daemon=True)
        self._thread.start()

    def drain(self) -> list[Finding]:
        """Return what was found since the last call about slots that are still the same."""
        found = []
        while self._findings:
            number, finding = self._findings.popleft()
            same = int(self._headers["generation"][finding.slot]) == finding.generation
            if same and number == self._round:
                found.append(finding)
        return found

    def close(self) -> None:
        """Stop after the slot in hand."""
        with self._lock:
            self._waiting.clear()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._runs = False
                    return
                number = self._round
                one = self._waiting.popleft()
            if int(self._headers["generation"][one.slot]) != one.generation:
                continue  # the memory may be gone with the key
            began = time.monotonic()
            checksum = slot_checksum(self._slot_of(one.slot), self._pieces[one.layer])
            is_good = checksum == one.checksum
            finding = Finding(one.layer, one.expert, one.slot, one.generation, is_good)
            self._findings.append((number, finding))
            self._wake()
            time.sleep(time.monotonic() - began)
