"""Fetches of readers: keys to lease, some at once, some when their read has returned.

A lease is promised for each key when the fetch comes, so that a fetch once begun never runs out of
quota. A key without a slot is `starved` until the cache finds it a FREE one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.wire.limits import MOST_KEYS_NAMED

from .leases import LeaseBook
from .outcome import FetchAnswer, KeyFault, Lease, RequestRefused


@dataclass(slots=True, eq=False)
class WaitingFetch:
    """One Fetch and how far it is."""

    client: int
    request: int
    keys: tuple[int, ...]
    waiting: set[int]
    leases: dict[int, Lease] = field(default_factory=dict)
    faults: dict[int, KeyFault] = field(default_factory=dict)


class FetchDesk:
    """All fetches that are not answered, and the leases of those that were."""

    def __init__(self, leases: LeaseBook, n_experts: int) -> None:
        self.leases = leases
        self.starved: dict[int, None] = {}  # keys wanted that are neither READY nor being read
        self._n_experts = n_experts
        self._open: dict[tuple[int, int], WaitingFetch] = {}
        self._wanted: dict[int, list[WaitingFetch]] = {}
        self._answers: list[FetchAnswer] = []

    def take_answers(self) -> list[FetchAnswer]:
        """Remove and return the answers due."""
        answers, self._answers = self._answers, []
        return answers

    def begin(self, client: int, request: int, keys: tuple[int, ...]) -> bool:
        """Register a fetch; False where it is answered already, the quota not allowing it.

        Raises RequestRefused where its number is in use, or a frame could not name all its keys.
        """
        if (client, request) in self._open:
            raise RequestRefused("malformed", f"fetch {request} is being served already")
        if len(keys) > self.leases.share:
            text = f"{len(keys)} keys in one fetch, the lease quota is {self.leases.share}"
            if len(keys) > MOST_KEYS_NAMED:
                raise RequestRefused("limit", f"fetch {request}: {text}")
            faults = tuple(self._fault(key, "NO_SLOT", text) for key in keys)
            self._answers.append(FetchAnswer(client, request, (), faults))
            return False
        if not self.leases.promise(client, len(keys)):
            self._answers.append(FetchAnswer(client, request, (), (), busy=True))
            return False
        fetch = WaitingFetch(client, request, keys, set(keys))
        self._open[client, request] = fetch
        for key in keys:
            self._wanted.setdefault(key, []).append(fetch)
        if not keys:
            self._answer(fetch)
        return True

    def landed(self, key: int, slot: int, generation: int) -> None:
        """`key` is READY: lease it to all who wait for it."""
        self.starved.pop(key, None)
        for fetch in self._wanted.pop(key, ()):
            self.leases.take(fetch.client, slot, generation)
            layer, expert = divmod(key, self._n_experts)
            fetch.leases[key] = Lease(layer, expert, slot, generation)
            self._settle(fetch, key)

    def failed(self, key: int, code: str, text: str) -> None:
        """`key` could not be read: whoever waits for it gets the fault."""
        for fetch in self._wanted.pop(key, ()):
            self._fail(fetch, key, code, text)

    @property
    def n_waiting(self) -> int:
        """Leases that unanswered fetches wait for."""
        return sum(len(fetch.waiting) for fetch in self._open.values())

    @property
    def wanted_keys(self) -> list[int]:
        """Keys that a fetch waits for."""
        return list(self._wanted)

    def wants(self, key: int) -> bool:
        """Whether a fetch waits for `key`."""
        return key in self._wanted

    def end(self, client: int, request: int, code: str) -> None:
        """Answer a fetch with what is there."""
        fetch = self._open.get((client, request))
        if fetch is None:
            return
        for key in sorted(fetch.waiting):
            layer, expert = divmod(key, self._n_experts)
            where = f"layer {layer} expert {expert}"
            starved = key in self.starved
            self._leave(fetch, key)
            if starved:
                self._fail(fetch, key, "NO_SLOT", f"{where}: no slot came free in time")
            else:
                self._fail(fetch, key, code, f"{where}: its read has not returned")

    def client_gone(self, client: int) -> None:
        """Forget a reader; what is being read for it goes on."""
        for fetch in [f for (owner, _), f in self._open.items() if owner == client]:
            for key in sorted(fetch.waiting):
                self._leave(fetch, key)
            self.leases.withdraw(client, len(fetch.waiting))
            del self._open[client, fetch.request]
        self.leases.drop_client(client)

    def _leave(self, fetch: WaitingFetch, key: int) -> None:
        waiters = self._wanted[key]
        waiters.remove(fetch)
        if not waiters:
            del self._wanted[key]
            self.starved.pop(key, None)

    def _fail(self, fetch: WaitingFetch, key: int, code: str, text: str) -> None:
        self.leases.withdraw(fetch.client, 1)
        fetch.faults[key] = self._fault(key, code, text)
        self._settle(fetch, key)

    def _settle(self, fetch: WaitingFetch, key: int) -> None:
        fetch.waiting.remove(key)
        if not fetch.waiting:
            self._answer(fetch)

    def _answer(self, fetch: WaitingFetch) -> None:
        del self._open[fetch.client, fetch.request]
        leases = tuple(fetch.leases[key] for key in fetch.keys if key in fetch.leases)
        faults = tuple(fetch.faults[key] for key in fetch.keys if key in fetch.faults)
        self._answers.append(FetchAnswer(fetch.client, fetch.request, leases, faults))

    def _fault(self, key: int, code: str, text: str) -> KeyFault:
        return KeyFault(*divmod(key, self._n_experts), code, text)
