"""A slow world around a slot cache: a device, readers, a drive, two sockets, and death.

`World` plays the server in the simplest way and checks, at every byte that a read writes, that
nobody can name the slot: not the device's table, not a launch that still runs, not the keys and
busy slots of the window, not a lease. Each public method is one event; which are possible depends
on the state, and an impossible one does nothing.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from expert_daemon.cache import SlotCache
from expert_daemon.cache_parts import CacheLimits, CacheMemory
from expert_daemon.outcome import Load, RequestRefused, TableChanges, WindowAnswer
from expert_daemon.policy import make_policy
from protocol.arena.layout import HEADER, SlotState

Key = tuple[int, int]


@dataclass
class Launch:
    """Work on the device that reads these slots until it is done."""

    epoch: int
    reads: dict[Key, int]
    done: bool = False


@dataclass
class Device:
    """The engine: it knows only what messages told it."""

    table: dict[Key, int] = field(default_factory=dict)
    applied: int = 0
    state: str = "lost"  # run, window, lost (nothing is launched before a Welcome)
    request: int = 0
    experts: tuple[Key, ...] = ()
    busy: frozenset[int] = frozenset()
    launches: list[Launch] = field(default_factory=list)
    launched: int = 0  # the word in the engine's page
    last_request: dict[str, Any] | None = None

    @property
    def epoch_done(self) -> int:
        running = [launch.epoch for launch in self.launches if not launch.done]
        return min(running) - 1 if running else self.launched

    @property
    def read_slots(self) -> set[int]:
        return {s for launch in self.launches if not launch.done for s in launch.reads.values()}

    def nameable(self) -> set[int]:
        """Slots whose bytes may not change now."""
        slots = self.read_slots
        if self.state == "run":
            slots |= set(self.table.values())
        elif self.state == "window":
            slots |= {self.table[key] for key in self.experts if key in self.table}
        return slots


class World:
    """See the module. `n_layers` x `n_experts` keys in `n_slots` slots."""

    def __init__(
        self,
        *,
        n_layers: int = 2,
        n_experts: int = 8,
        n_slots: int = 10,
        free_pool: int = 2,
        lease_quota: int = 3,
        history: int = 6,
        policy: str = "lfu-da",
    ) -> None:
        self.n_experts = n_experts
        self.n_keys = n_layers * n_experts
        self.policy = policy
        self.limits = CacheLimits(free_pool, lease_quota, history)
        self.memory = CacheMemory(
            np.zeros((n_layers, n_experts), np.int32), np.zeros(n_slots, HEADER)
        )
        self.content: list[Any] = [None] * n_slots
        self.device: Device | None = None
        self.step = 0
        self.next_request = 0
        self.next_fetch = 0
        self.served = 0
        self._start(SlotCache.empty(self.memory, self._policy(), self.limits))

    def _policy(self) -> Any:
        return make_policy(self.policy, self.n_keys)

    def _start(self, cache: SlotCache) -> None:
        self.cache = cache
        self.outstanding: list[Load] = []
        self.to_engine: deque[Any] = deque()
        self.to_daemon: deque[Any] = deque()
        self.sent = cache.table_version
        self.fetches: dict[tuple[int, int], tuple[Key, ...]] = {}
        self.leases: list[tuple[int, Any]] = []

    # the server

    def serve(self) -> None:
        """Drain the cache and check what must hold after every event."""
        due = self.cache.drain()
        self.outstanding += due.loads
        for load in due.promoted:
            assert load in self.outstanding
        for load in due.loads:
            assert self.memory.headers[load.slot]["state"] == SlotState.LOADING
        for answer in due.answers:
            self._check_answer(answer)
            self._send(answer)
            self.sent = max(self.sent, answer.table.to_version)
        for fetched in due.fetches:
            self._take_fetch(fetched)
        if self.device and not self.cache.window_open and self.cache.table_version > self.sent:
            changes = self.cache.changes_since(self.sent)
            self._send(changes)
            self.sent = changes.to_version
        self.cache.check()
        self._check_bytes()

    def _send(self, message: Any) -> None:
        if self.device is not None:
            self.to_engine.append(message)

    def _check_answer(self, answer: WindowAnswer) -> None:
        self.served += 1
        failed = {(fault.layer, fault.expert) for fault in answer.errors}
        for expert, slot in zip(answer.experts, answer.slots, strict=True):
            key = (answer.layer, expert)
            assert (slot < 0) == (key in failed)
            if slot >= 0:
                assert self.content[slot] == key, "an answered slot holds its key"
        assert list(answer.table.changes) == sorted(answer.table.changes)

    def _take_fetch(self, answer: Any) -> None:
        keys = self.fetches.pop((answer.client, answer.request))
        if answer.busy:
            assert not answer.leases
            assert not answer.errors
            return
        found = {(one.layer, one.expert) for one in (*answer.leases, *answer.errors)}
        assert found == set(keys)
        self.leases += [(answer.client, lease) for lease in answer.leases]

    def _check_bytes(self) -> None:
        for _, lease in self.leases:
            assert self.content[lease.slot] == (lease.layer, lease.expert), "a leased slot changed"
            assert self.memory.headers[lease.slot]["generation"] == lease.generation
        for layer, expert, slot in self.cache.resident():
            assert self.content[slot] == (layer, expert), "a READY slot with other bytes"
        if self.device is not None:
            for launch in self.device.launches:
                if not launch.done:
                    for key, slot in launch.reads.items():
                        assert self.content[slot] == key, "a launch reads other bytes"

    # the drive

    def write(self, n: int) -> None:
        """Some bytes of an outstanding read arrive."""
        if self.outstanding:
            self._write(self.outstanding[n % len(self.outstanding)], "part")

    def finish(self, n: int) -> None:
        """A read returns whole."""
        if self.outstanding:
            load = self.outstanding.pop(n % len(self.outstanding))
            self._write(load, (load.layer, load.expert))
            self.cache.finish(load, 1)

    def fail(self, n: int, *, written: bool = True) -> None:
        """A read returns with an error, with some bytes written or none."""
        if self.outstanding:
            load = self.outstanding.pop(n % len(self.outstanding))
            if written:
                self._write(load, "part")
            self.cache.fail(load, "EIO", "injected")

    def disown(self, n: int) -> None:
        """The server gives a read up that goes on."""
        if self.outstanding:
            load = self.outstanding[n % len(self.outstanding)]
            self.cache.disown(load, "TIMEOUT", "injected")

    def hedge(self, n: int) -> None:
        """A read is slow: its key is read into another slot as well."""
        if self.outstanding:
            twin = self.cache.hedge(self.outstanding[n % len(self.outstanding)])
            if twin is not None:
                self.outstanding.append(twin)

    def _write(self, load: Load, what: Any) -> None:
        slot = load.slot
        assert self.memory.headers[slot]["state"] == SlotState.LOADING, "a write outside LOADING"
        assert all(lease.slot != slot for _, lease in self.leases), "a write into a leased slot"
        if self.device is not None:
            assert slot not in self.device.nameable(), "a write into a slot that can be named"
        self.content[slot] = what

    # the engine

    def attach(self) -> None:
        """A new engine process says Hello, or the old one again after the daemon's restart."""
        if self.device is None:
            self.device = Device()
        elif self.device.state != "lost":
            return
        self.to_daemon.clear()  # of a session that has ended
        self.to_engine.clear()
        self.to_daemon.append(("hello",))

    def launch(self, picks: list[int]) -> None:
        """The device begins to read some of the slots that its table names."""
        device = self.device
        if device is None or device.state != "run" or not device.table:
            return
        keys = sorted(device.table)
        reads = {keys[n % len(keys)]: device.table[keys[n % len(keys)]] for n in picks}
        for key, slot in reads.items():
            assert self.content[slot] == key, "the device names a slot with other bytes"
        device.launched += 1
        device.launches.append(Launch(device.launched, reads))

    def launch_done(self, n: int) -> None:
        """One launch ends; on several streams not always the first."""
        if self.device is not None and self.device.launches:
            self.device.launches.pop(n % len(self.device.launches)).done = True

    def ask(self, layer: int, experts: list[int]) -> None:
        """The engine meets a miss: from now on it launches nothing."""
        device = self.device
        if device is None or device.state != "run":
            return
        self.next_request += 1
        self.step += 1
        device.state = "window"
        device.request = self.next_request
        device.experts = tuple((layer, expert) for expert in experts)
        device.busy = frozenset(device.read_slots)
        device.last_request = {
            "request": self.next_request,
            "step": self.step,
            "layer": layer,
            "experts": experts,
            "busy": sorted(device.busy),
            "applied": device.applied,
            "epoch_done": device.epoch_done,
        }
        self.to_daemon.append(("ask", device.last_request))

    def ask_again(self) -> None:
        """The same request once more."""
        if self.device is not None and self.device.state == "window":
            self.to_daemon.append(("ask", self.device.last_request))

    def cancel(self) -> None:
        """A deadline passed; the window stays until the final answer."""
        if self.device is not None and self.device.state == "window":
            self.to_daemon.append(("cancel", self.device.request))

    def lose(self) -> None:
        """The engine gives the answer up: nothing is launched before the whole table comes."""
        if self.device is not None and self.device.state in {"window", "run"}:
            self._resync()

    def send_ack(self) -> None:
        """Tell what is applied and done."""
        device = self.device
        if device is not None and device.state in {"run", "window"}:
            self.to_daemon.append(("ack", device.applied, device.epoch_done))

    def kill_engine(self) -> None:
        """The engine's process dies; the daemon hears of it at once."""
        if self.device is not None:
            self.device = None
            self.to_engine.clear()
            self.to_daemon.clear()
            self.cache.engine_gone()

    def _resync(self) -> None:
        assert self.device is not None
        self.device.state = "lost"
        self.to_daemon.append(("resync",))

    # messages

    def deliver_to_daemon(self) -> None:
        """The next message of the engine arrives."""
        if not self.to_daemon or self.device is None:
            return
        kind, *fields = self.to_daemon.popleft()
        launched = self.device.launched
        if kind == "hello":
            self.cache.engine_attached()
            self._welcome()
        elif kind == "resync":
            self.cache.resync()
            self._welcome()
        elif kind == "ask":
            with suppress(RequestRefused):  # crossed with a Cancel or a Resync
                self.cache.open_window(**fields[0], epoch_launched=launched)
        elif kind == "cancel":
            self.cache.cancel(fields[0])
        else:
            self.cache.ack(fields[0], fields[1], launched)

    def _welcome(self) -> None:
        table = {(layer, expert): slot for layer, expert, slot in self.cache.resident()}
        self.to_engine.append(("welcome", self.cache.table_version, table))
        self.sent = self.cache.table_version

    def deliver_to_engine(self) -> None:
        """The next message of the daemon arrives."""
        if not self.to_engine or self.device is None:
            return
        message = self.to_engine.popleft()
        device = self.device
        if isinstance(message, tuple):
            _, device.applied, table = message
            device.table = dict(table)
            device.state = "run"
        elif device.state == "lost":
            return
        elif isinstance(message, TableChanges):
            self._apply(message)
        elif device.state == "window" and message.request == device.request:
            device.state = "run"
            self._apply(message.table)
            if device.state == "run":
                for expert, slot in zip(message.experts, message.slots, strict=True):
                    assert slot < 0 or device.table.get((message.layer, expert)) == slot

    def lose_message(self) -> None:
        """A push to a stopped engine is dropped; the engine sees a gap later."""
        if self.to_engine and isinstance(self.to_engine[0], TableChanges):
            self.to_engine.popleft()

    def _apply(self, table: TableChanges) -> None:
        device = self.device
        assert device is not None
        if table.from_version > device.applied:
            self._resync()
        elif device.applied < table.to_version:
            for layer, expert, slot in table.changes:
                if slot < 0:
                    device.table.pop((layer, expert), None)
                else:
                    device.table[layer, expert] = slot
            device.applied = table.to_version
            assert len(set(device.table.values())) == len(device.table), "two keys in one slot"

    # readers

    def fetch(self, client: int, keys: list[Key]) -> None:
        """A reader wants leases."""
        self.next_fetch += 1
        self.fetches[client, self.next_fetch] = tuple(keys)
        self.cache.fetch(client, self.next_fetch, keys)

    def end_fetch(self, n: int) -> None:
        """A fetch's deadline passes."""
        if self.fetches:
            client, request = sorted(self.fetches)[n % len(self.fetches)]
            self.cache.end_fetch(client, request)
            self.serve()
            assert (client, request) not in self.fetches

    def release(self, n: int) -> None:
        """A reader gives one lease back."""
        if self.leases:
            client, lease = self.leases.pop(n % len(self.leases))
            assert self.cache.release(client, [(lease.slot, lease.generation)]) == 1

    def release_wrong(self, n: int) -> None:
        """A reader gives back what it does not hold."""
        if self.leases:
            client, lease = self.leases[n % len(self.leases)]
            assert self.cache.release(client + 100, [(lease.slot, lease.generation)]) == 0
            assert self.cache.release(client, [(lease.slot, lease.generation - 1)]) == 0

    def kill_client(self, client: int) -> None:
        """A reader's process dies."""
        self.leases = [(owner, lease) for owner, lease in self.leases if owner != client]
        self.fetches = {k: keys for k, keys in self.fetches.items() if k[0] != client}
        self.cache.client_gone(client)

    # the daemon's death

    def restart(self, *, engine_lives: bool) -> None:
        """kill -9 of the daemon, and its successor on the same arena."""
        if not engine_lives:
            self.device = None
        before = {
            slot: (int(header["layer"]), int(header["expert"]))
            for slot, header in enumerate(self.memory.headers)
            if header["state"] == SlotState.READY
        }
        if self.device is not None:
            self.device.state = "lost"
        self._start(
            SlotCache.adopt(
                self.memory,
                self._policy(),
                self.limits,
                engine_may_live=self.device is not None,
            )
        )
        assert {s: (layer, expert) for layer, expert, s in self.cache.resident()} == before

    # the end

    def run_out(self) -> None:
        """Let everything under way end well; then no slot is lost and nobody waits."""
        for _ in range(100):
            self.serve()
            while self.outstanding:
                self.finish(0)
                self.serve()
            if self.device is not None:
                if self.device.state == "lost":
                    self.attach()
                self.device.launches.clear()
                if not self.to_engine and self.device.applied < self.cache.table_version:
                    self.lose()
                self.send_ack()
            while self.to_daemon:
                self.deliver_to_daemon()
                self.serve()
            while self.to_engine:
                self.deliver_to_engine()
                self.serve()
            quiet = self.device is None or self.device.state == "run"
            if quiet and not self.outstanding and not self.cache.window_open:
                states = self.memory.headers["state"].tolist()
                if SlotState.LOADING not in states and SlotState.RETIRING not in states:
                    return
        raise AssertionError("something waits for ever")
