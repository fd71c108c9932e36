"""Clients of an expert daemon that do all that they may, at random, and compare every byte.

Each runs on a thread of its own until its time is over; `live` collects what went wrong: an
exception, other bytes than the checkpoint's, an error in an answer, a wait that was too long.
"""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from protocol.files.checkpoint import Checkpoint
from protocol.wire import messages as m
from protocol.wire.client import ExpertClient
from tests.support.shard_bytes import expert_bytes, slot_bytes

WINDOWS = [1, 2, 4, 8, 16]
SHARES = [0.3, 0.7, 0.9, 1.0]  # of a layer's experts that a chunk picks
N_READERS = 3


@dataclass
class Life:
    """A daemon's clients, how long they live and wait, and what they have seen."""

    checkpoint: Checkpoint
    runtime_dir: Path
    seed: int
    seconds: float
    longest_s: float  # that an answer may take
    sizes: tuple[int, int]  # of the arena, bytes: the smallest and the largest to be asked for
    wrong: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    longest: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._bytes: dict[tuple[int, int], bytes] = {}
        self._ends = time.monotonic() + self.seconds
        self.config = self.checkpoint.config

    @property
    def is_over(self) -> bool:
        """Whether everybody is to stop."""
        return bool(self.wrong) or time.monotonic() > self._ends

    def keys(self, dice: random.Random, n: int) -> list[tuple[int, int]]:
        """So many keys of the model, some perhaps twice."""
        n_layers, n_experts = self.config.n_layers, self.config.n_experts
        return [(dice.randrange(n_layers), dice.randrange(n_experts)) for _ in range(n)]

    @contextmanager
    def timed(self, what: str):
        """Count something and how long it takes."""
        began = time.monotonic()
        yield
        took = time.monotonic() - began
        self.counts[what] = self.counts.get(what, 0) + 1
        self.longest[what] = max(self.longest.get(what, 0.0), took)
        if took > self.longest_s:
            self.wrong.append(f"{what} took {took:.1f} s")

    def compare(self, client: ExpertClient, layer: int, expert: int, slot: int) -> None:
        """Compare a slot's bytes with the checkpoint's."""
        key = (layer, expert)
        if key not in self._bytes:
            self._bytes[key] = expert_bytes(self.checkpoint, layer, expert)
        if slot_bytes(client, slot) != self._bytes[key]:
            self.wrong.append(f"slot {slot} has other bytes than layer {layer} expert {expert}")


class RandomEngine:
    """The engine: decoding, chunks that stream, hints, what a resize asks of it."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._dice = random.Random(life.seed)
        self._n_layers, self._n_experts = life.config.n_layers, life.config.n_experts
        self._step = 0

    def live(self) -> None:
        life = self._life
        fingerprint, top_k = life.checkpoint.fingerprint, life.config.top_k
        with ExpertClient(life.runtime_dir, "engine", fingerprint, top_k) as client:
            self._client = client
            client.applied = client.welcome.version
            while not life.is_over:
                self._step += 1
                act = self._decode if self._dice.random() < 0.5 else self._stream
                for layer in range(self._n_layers):
                    act(layer)
                    if self._dice.random() < 0.3:
                        self._between_steps()
                self._between_steps()

    def _some(self, least: int, most: int) -> list[int]:
        return sorted(self._dice.sample(range(self._n_experts), self._dice.randint(least, most)))

    def _ahead(self, layer: int, most: int) -> list[tuple[int, int]]:
        if layer + 1 == self._n_layers or self._dice.random() < 0.2:
            return []
        return [(layer + 1, expert) for expert in self._some(1, most)]

    def _decode(self, layer: int) -> None:
        experts = self._some(1, self._life.config.top_k)
        with self._life.timed("miss"):
            hints = self._ahead(layer, 2)
            answer = self._client.miss(layer, experts, step=self._step, hints=hints)
        self._take(layer, experts, answer)
        if self._dice.random() < 0.3:
            self._client.hint(self._step, layer, self._some(3, 3))

    def _stream(self, layer: int) -> None:
        n = max(1, int(self._n_experts * self._dice.choice(SHARES)))
        experts, seen = self._some(n, n), []
        window, ahead = self._dice.choice(WINDOWS), self._ahead(layer, 16)
        with (
            self._life.timed("stream"),
            self._client.stream(
                layer, experts, window=window, step=self._step, ahead=ahead
            ) as stream,
        ):
            for part in stream:
                named = self._take(layer, experts, part)
                seen += named
                if named and self._dice.random() < 0.1:
                    time.sleep(self._dice.random() * 0.02)
                if named:
                    stream.consumed(named[-1])
                if self._dice.random() < 0.01:
                    break
            last = stream.close()
            if last is not None:
                self._client.applied = max(self._client.applied, last.to_version)
            elif seen != experts and not self._life.wrong:
                self._life.wrong.append(f"stream of {experts} named {seen}")

    def _take(self, layer: int, experts: Sequence[int], answer: m.SlotChanges) -> list[int]:
        self._client.applied = max(self._client.applied, answer.to_version)
        self._life.wrong += [str(fault) for fault in answer.errors]
        named = [(e, slot) for e, slot in zip(experts, answer.slots, strict=True) if slot >= 0]
        for expert, slot in named:
            self._life.compare(self._client, layer, expert, slot)
        return [expert for expert, _ in named]

    def _between_steps(self) -> None:
        client = self._client
        for change in client.memory_changes():
            if isinstance(change, m.Drop):
                client.dropped(change)
            else:
                client.added(change)
        for changes in client.changes():
            if changes.from_version > client.applied:
                client.applied = client.resync().version
            client.applied = max(client.applied, changes.to_version)
        client.ack(client.applied)


class RandomReader:
    """A reader: leases, held for a moment, and rows."""

    def __init__(self, life: Life, number: int) -> None:
        self._life = life
        self._dice = random.Random(1000 * life.seed + number)

    def live(self) -> None:
        life, dice = self._life, self._dice
        with ExpertClient(life.runtime_dir) as client:
            while not life.is_over:
                keys = list(dict.fromkeys(life.keys(dice, 3)))
                with life.timed("fetch"):
                    leases = client.fetch(keys, wait_ms=15_000)
                for lease in leases:
                    life.compare(client, lease.layer, lease.expert, lease.slot)
                time.sleep(dice.random() * 0.02)
                client.release(leases)
                if dice.random() < 0.3:
                    with life.timed("rows"):
                        client.rows(0, [dice.randrange(1000) for _ in range(5)])


class RandomOwner:
    """Who resizes the arena and wants keys warm."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._dice = random.Random(life.seed + 1)

    def live(self) -> None:
        life, dice = self._life, self._dice
        with ExpertClient(life.runtime_dir) as client:
            while not life.is_over:
                time.sleep(dice.random())
                client.resize(dice.randint(*life.sizes))  # at the engine's next step
                life.counts["resize"] = life.counts.get("resize", 0) + 1
                client.warm(life.keys(dice, 30))


def live(life: Life) -> None:
    """Have all of them live; what went wrong is in `life.wrong`."""

    def guarded(act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:  # noqa: BLE001  told by the test
            life.wrong.append(traceback.format_exc())

    acts = [RandomEngine(life).live, RandomOwner(life).live]
    acts += [RandomReader(life, number).live for number in range(N_READERS)]
    threads = [threading.Thread(target=guarded, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(life.seconds + 60)
        if thread.is_alive():
            life.wrong.append("a client has not ended")
