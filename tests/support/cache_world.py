"""A slow world around a slot cache: a device, readers, a drive, two sockets, and death.

`World` plays the server in the simplest way and checks, at every byte that a read writes, that
nobody can name the slot: not the device's table, not a launch that still runs, not the keys and
busy slots of the window, not a lease. Each public method is one event; which are possible depends
on the state, and an impossible one does nothing.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np

from expert_daemon.cache import SlotCache
from expert_daemon.cache_parts import CacheLimits, CacheMemory
from expert_daemon.outcome import Load, RequestRefused, TableChanges, WindowAnswer
from expert_daemon.policy import make_policy
from expert_daemon.slots import SlotRooms
from protocol.arena.layout import HEADER, SlotState

from .cache_device import Device, Key, Launch


class World:
    """See the module. `n_layers` x `n_experts` keys in `n_slots` slots."""

    def __init__(
        self,
        *,
        n_layers: int = 2,
        n_experts: int = 8,
        n_slots: int = 10,
        free_pool: int = 2,
        lease_quota: int = 6,
        history: int = 6,
        policy: str = "lfu-da",
        n_slots_max: int = 0,
        n_common: int | None = None,
    ) -> None:
        """Make a new arena.

        n_common  behind so many slots every second one is too small for layer 0; None: none is
        """
        self.n_experts = n_experts
        self.n_keys = n_layers * n_experts
        self.policy = policy
        self.free_pool, self.lease_quota, self.history = free_pool, lease_quota, history
        n_slots_max = max(n_slots, n_slots_max)
        rooms = None
        if n_common is not None:
            of_slot = [int(slot >= n_common and slot % 2) for slot in range(n_slots_max)]
            rooms = SlotRooms(of_slot, (0,) + (1,) * (n_layers - 1))
        table = np.zeros((n_layers, n_experts), np.int32)
        self.memory = CacheMemory(table, np.zeros(n_slots_max, HEADER), rooms=rooms)
        self.content: list[Any] = [None] * n_slots_max
        self.n_slots = n_slots  # the word in the identity page
        self.populated = set(range(n_slots))
        self.cap = n_slots  # nothing more is ever populated
        self.device: Device | None = None
        self.step = 0
        self.next_request = 0
        self.next_fetch = 0
        self.served = 0
        self._start(SlotCache.empty(self.memory, self._policy(), self._limits()))

    def _limits(self) -> CacheLimits:
        return CacheLimits(
            self.free_pool, self.lease_quota, self.history, self.n_slots, follow_hints=True
        )

    def _policy(self) -> Any:
        return make_policy(self.policy, self.n_keys)

    def _start(self, cache: SlotCache) -> None:
        self.cache = cache
        self.outstanding: list[Load] = []
        self.has_session = False
        self.to_engine: deque[Any] = deque()
        self.to_daemon: deque[Any] = deque()
        self.sent = cache.table_version
        self.answered: dict[int, set[int]] = {}  # request -> experts named so far
        self.foretold: Any = None  # slots and changes of the answer that is due now
        self.resize: tuple[str, int] | None = None  # what goes on: to how many slots
        self.fetches: dict[tuple[int, int], tuple[Key, ...]] = {}
        self.leases: list[tuple[int, Any]] = []

    # the server

    def serve(self) -> None:
        """Drain the cache and check what must hold after every event."""
        due = self.cache.drain()
        self.outstanding += due.loads
        for load in due.promoted:
            assert self._is_outstanding(load)
        for load in due.loads:
            assert self.memory.headers[load.slot]["state"] == SlotState.LOADING
        if self.foretold is not None:
            told, self.foretold = self.foretold, None
            assert told in [(answer.slots, answer.table) for answer in due.answers]
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
        self._go_on_shrinking()
        self.cache.check()
        self._check_bytes()

    def _is_outstanding(self, load: Load) -> bool:
        return any(
            (load.slot, load.generation) == (one.slot, one.generation) for one in self.outstanding
        )

    def _send(self, message: Any) -> None:
        if self.device is not None and self.has_session:
            self.to_engine.append(message)

    def _check_answer(self, answer: WindowAnswer) -> None:
        self.served += answer.final
        failed = {(fault.layer, fault.expert) for fault in answer.errors}
        named = self.answered.setdefault(answer.request, set())
        for expert, slot in zip(answer.experts, answer.slots, strict=True):
            key = (answer.layer, expert)
            assert slot < 0 or key not in failed
            if slot >= 0:
                assert self.content[slot] == key, "an answered slot holds its key"
            if slot >= 0 or key in failed:
                named.add(expert)
            else:
                assert expert in named or not answer.final, "an expert without slot and error"
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
        assert len(self.populated) <= self.cap, "more memory than was allowed"
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
        assert slot in self.populated, "a write beyond what is populated"
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
        self.device.resync = 0
        self.has_session = False
        self.to_daemon.append(("hello",))

    def launch(self, picks: list[int]) -> None:
        """The device begins to read some of the slots that its table names."""
        device = self.device
        readable = {} if device is None else device.readable()
        if device is None or not readable:
            return
        keys = sorted(readable)
        reads = {keys[n % len(keys)]: readable[keys[n % len(keys)]] for n in picks}
        for key, slot in reads.items():
            assert slot in device.registered, "a launch reads what is not registered"
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
        device.last_request = self._request(device, layer, experts)
        device.state = "window"
        self.to_daemon.append(("ask", device.last_request))

    def ask_stream(
        self, layer: int, experts: list[int], window: int = 2, ahead: list[Key] | None = None
    ) -> None:
        """The engine has a chunk: it launches what is named, and nothing else."""
        device = self.device
        if device is None or device.state != "run":
            return
        device.last_request = self._request(device, layer, experts)
        device.last_request |= {"window": window, "ahead": ahead or []}
        device.state = "stream"
        device.named = {}
        self.to_daemon.append(("stream", device.last_request))

    def _request(self, device: Device, layer: int, experts: list[int]) -> dict[str, Any]:
        self.next_request += 1
        self.step += 1
        device.request = self.next_request
        device.experts = tuple((layer, expert) for expert in experts)
        device.busy = frozenset(device.read_slots)
        return {
            "request": self.next_request,
            "step": self.step,
            "layer": layer,
            "experts": experts,
            "busy": sorted(device.busy),
            "applied": device.applied,
            "epoch_done": device.epoch_done,
        }

    def consume(self, n: int) -> None:
        """Nothing reads the first experts of a stream any more."""
        device = self.device
        if device is None or device.state != "stream" or not device.consumable():
            return
        free = device.consumable()
        upto = n % len(free)
        for key in free[: upto + 1]:
            del device.named[key]
        self.to_daemon.append(("consumed", device.request, free[upto][1]))

    def hint(self, layer: int, experts: list[int], steps_on: int = 0) -> None:
        """The engine foresees picks."""
        if self.device is not None and self.device.state == "run":
            keys = [(layer, expert) for expert in experts]
            self.to_daemon.append(("hint", self.step + steps_on, keys))

    def touch(self, keys: list[Key]) -> None:
        """The engine reports picks."""
        if self.device is not None and self.device.state == "run":
            self.to_daemon.append(("touch", self.step, sorted(set(keys))))

    def ask_again(self) -> None:
        """The same request once more."""
        if self.device is not None and self.device.state in {"window", "stream"}:
            kind = "ask" if self.device.state == "window" else "stream"
            self.to_daemon.append((kind, self.device.last_request))

    def cancel(self) -> None:
        """A deadline passed; the window stays until the final answer."""
        if self.device is not None and self.device.state in {"window", "stream"}:
            self.to_daemon.append(("cancel", self.device.request))

    def lose(self) -> None:
        """The engine gives the answer up: nothing is launched before the whole table comes."""
        if self.device is not None and self.device.state in {"window", "stream", "run"}:
            self._resync()

    def lose_patience(self) -> None:
        """The engine asks for the whole table a second time; the first answer is void."""
        if self.device is not None and self.device.state == "lost" and self.device.resync:
            self._resync()

    def send_ack(self) -> None:
        """Tell what is applied and done."""
        device = self.device
        if device is not None and device.state in {"run", "window", "stream"}:
            n_slots = len(device.registered)
            self.to_daemon.append(("ack", device.applied, device.epoch_done, n_slots))

    def kill_engine(self) -> None:
        """The engine's process dies; the daemon hears of it at once."""
        if self.device is not None:
            self.device = None
            self.to_engine.clear()
            self.to_daemon.clear()
            self.cache.engine_gone()
            self._resized_without_engine()

    def _resync(self) -> None:
        assert self.device is not None
        self.device.state = "lost"
        self.device.resync += 1
        self.to_daemon.append(("resync", self.device.resync))

    # messages

    def deliver_to_daemon(self) -> None:
        """The next message of the engine arrives."""
        if not self.to_daemon or self.device is None:
            return
        kind, *fields = self.to_daemon.popleft()
        launched = self.device.launched
        if kind == "hello":
            self.answered.clear()
            self.has_session = True
            self.cache.engine_attached()
            self._welcome(0)
            self._tell_of_resize()
        elif kind == "resync":
            self.cache.resync()
            self._welcome(fields[0])
        elif kind == "stream":
            with suppress(RequestRefused):
                self.cache.open_stream(**fields[0], epoch_launched=launched)
        elif kind == "consumed":
            self.cache.consume(*fields)
        elif kind == "hint":
            self.cache.hint(*fields)
        elif kind == "touch":
            self.cache.touch(fields[0], np.array(fields[1], np.uint16).reshape(-1, 2))
        elif kind == "dropped":
            self._punch()
        elif kind == "ask":
            asked = fields[0]
            names = ("request", "layer", "experts", "applied")
            self.foretold = self.cache.foretell(*(asked[name] for name in names))
            with suppress(RequestRefused):  # crossed with a Cancel or a Resync
                self.cache.open_window(**asked, epoch_launched=launched)
        elif kind == "cancel":
            self.cache.cancel(fields[0])
        else:
            self.cache.ack(fields[0], fields[1], launched)
            if self.resize is not None and self.resize[0] == "grow" and fields[2] >= self.n_slots:
                self._use(self.n_slots)

    def _welcome(self, resync: int) -> None:
        table = {(layer, expert): slot for layer, expert, slot in self.cache.resident()}
        version = self.cache.table_version
        self.to_engine.append(("welcome", resync, version, table, self.n_slots))
        self.sent = self.cache.table_version

    def deliver_to_engine(self) -> None:
        """The next message of the daemon arrives."""
        if not self.to_engine or self.device is None:
            return
        message = self.to_engine.popleft()
        device = self.device
        if isinstance(message, tuple) and message[0] != "welcome":
            self._memory_message(device, *message)
        elif isinstance(message, tuple):
            _, resync, version, table, n_slots = message
            if resync == device.resync:
                assert device.state == "lost"
                device.applied, device.table, device.state = version, dict(table), "run"
                if not resync:  # what a Resync finds may cross with a Drop
                    device.registered |= set(range(n_slots))
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
        elif device.state == "stream" and message.request == device.request:
            self._apply(message.table)
            if device.state == "stream":
                for expert, slot in zip(message.experts, message.slots, strict=True):
                    if slot >= 0:
                        assert device.table.get((message.layer, expert)) == slot
                        device.named[message.layer, expert] = slot
                if message.final:
                    device.state = "run"

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
        self._repopulate()
        before = {
            slot: (int(header["layer"]), int(header["expert"]))
            for slot, header in enumerate(self.memory.headers)
            if header["state"] == SlotState.READY
        }
        if self.device is not None:
            self.device.state = "lost"
            self.device.resync = 0
        self._start(
            SlotCache.adopt(
                self.memory,
                self._policy(),
                self._limits(),
                engine_may_live=self.device is not None,
            )
        )
        assert {s: (layer, expert) for layer, expert, s in self.cache.resident()} == before

    # the size

    def shrink(self, n: int) -> None:
        """The owner of the machine wants memory back."""
        least = self.free_pool + 4
        if self.resize is None and self.n_slots > least:
            n_slots = least + n % (self.n_slots - least)
            self.resize = ("shrink", n_slots)
            self.cache.resize(n_slots, free_pool=self.free_pool, lease_quota=self.lease_quota)
            self.cache.warm(self.cache.take_displaced())

    def grow(self, n: int) -> None:
        """The owner of the machine gives more memory."""
        room = len(self.content) - self.n_slots
        if self.resize is None and room:
            n_slots = self.n_slots + 1 + n % room
            self.cap = n_slots
            self.populated |= set(range(n_slots))
            self.n_slots = n_slots
            self.resize = ("grow", n_slots)
            self._tell_of_resize()
            if self.device is None:
                self._resized_without_engine()

    def undo_growth(self) -> None:
        """Who asked for it wants the size before, and the engine has not acknowledged yet."""
        if self.resize is not None and self.resize[0] == "grow":
            self.resize = ("shrink", self.cache.n_slots)

    def _go_on_shrinking(self) -> None:
        if self.resize is None or self.resize[0] == "grow" or self.cache.n_closing:
            return
        if self.resize[0] == "shrink":
            self.resize = ("drop", self.resize[1])
            self._tell_of_resize()
        if self.device is None:
            self._punch()

    def _tell_of_resize(self) -> None:
        if self.resize is not None and self.resize[0] != "shrink":
            self._send(self.resize)

    def _memory_message(self, device: Device, kind: str, n_slots: int) -> None:
        """What the engine does of it at its step boundary; here that is now."""
        if kind == "drop":
            going = {slot for slot in device.registered if slot >= n_slots}
            assert not going & device.nameable(), "a slot to be dropped can be named"
            device.registered -= going
            self.to_daemon.append(("dropped",))
        else:
            device.registered |= set(range(n_slots))

    def _punch(self) -> None:
        if self.resize is None or self.resize[0] != "drop":
            return
        self.n_slots = self.cap = self.resize[1]
        self.resize = None
        for slot in [slot for slot in self.populated if slot >= self.n_slots]:
            self._unpopulate(slot)

    def _unpopulate(self, slot: int) -> None:
        if self.device is not None:
            assert slot not in self.device.registered, "a hole under a registration"
        assert self.memory.headers[slot]["state"] == SlotState.FREE
        assert all(load.slot != slot for load in self.outstanding), "a hole under a read"
        self.populated.discard(slot)
        self.content[slot] = None

    def _use(self, n_slots: int) -> None:
        self.resize = None
        self.cache.resize(n_slots, free_pool=self.free_pool, lease_quota=self.lease_quota)

    def _resized_without_engine(self) -> None:
        if self.resize is not None and self.resize[0] == "drop":
            self._punch()
        elif self.resize is not None and self.resize[0] == "grow":
            self._use(self.resize[1])

    def _repopulate(self) -> None:
        """A successor uses as many slots as the identity page says."""
        self.populated = set(range(self.n_slots))
        self.cap = self.n_slots

    # the end

    def lose_window(self) -> None:
        """An engine gives a stream up that the daemon refused; one that is open ends by itself."""
        is_refused = not (self.cache.window_open or self.to_daemon or self.to_engine)
        if is_refused and self.device is not None and self.device.state == "stream":
            self.cancel()

    def run_out(self) -> None:
        """Let everything under way end well; then no slot is lost and nobody waits."""
        for _ in range(100):
            self.serve()
            while self.outstanding:
                self.finish(0)
                self.serve()
            if self.resize is not None:
                for client in range(3):  # a slot that is leased cannot go
                    self.kill_client(client)
            if self.device is not None:
                if self.device.state == "lost":
                    self.attach()
                self.device.launches.clear()
                self.consume(-1)
                self.lose_window()
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
            quiet = quiet and self.resize is None
            if quiet and not self.outstanding and not self.cache.window_open:
                states = self.memory.headers["state"].tolist()
                if SlotState.LOADING not in states and SlotState.RETIRING not in states:
                    return
        raise AssertionError("something waits for ever")
