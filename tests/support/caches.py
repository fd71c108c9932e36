"""Small slot caches for tests, and the shortest way to serve a request with one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from expert_daemon.cache import SlotCache
from expert_daemon.cache_parts import CacheLimits, CacheMemory
from expert_daemon.outcome import Load, WindowAnswer
from expert_daemon.policy import make_policy
from protocol.arena.layout import HEADER, SlotState


class Rig:
    """A cache with an engine attached, and what a server would keep beside it."""

    def __init__(
        self,
        n_slots: int = 8,
        *,
        n_layers: int = 2,
        n_experts: int = 16,
        free_pool: int = 0,
        lease_quota: int = 4,
        history: int = 1000,
        policy: str = "lfu-da",
        n_slots_max: int = 0,
    ) -> None:
        self.policy = policy
        self.limits = CacheLimits(free_pool, lease_quota, history, n_slots, follow_hints=True)
        table = np.zeros((n_layers, n_experts), np.int32)
        self.memory = CacheMemory(table, np.zeros(max(n_slots, n_slots_max), HEADER))
        self.cache = SlotCache.empty(self.memory, self.new_policy(), self.limits)
        self.cache.engine_attached()
        self.request = 0
        self.step = 0
        self.applied = 0
        self.parts_due: list[WindowAnswer] = []

    def new_policy(self):
        return make_policy(self.policy, self.memory.table.size)

    def ask(
        self,
        layer: int,
        experts: Sequence[int],
        *,
        busy: Sequence[int] = (),
        step: int | None = None,
    ) -> list[Load]:
        """Open a window; the loads to start."""
        self.request += 1
        self.step = self.step + 1 if step is None else step
        self.cache.open_window(self.request, self.step, layer, experts, busy, self.applied, 0)
        self.due = self.cache.drain()
        return self.due.loads

    def answer(self) -> WindowAnswer:
        """The one answer that is due now; its changes count as applied."""
        self.due.answers += self.cache.drain().answers
        (answer,) = self.due.answers
        self.due.answers = []
        self.applied = max(self.applied, answer.table.to_version)
        return answer

    def get(self, layer: int, experts: Sequence[int], **how) -> WindowAnswer:
        """Serve a whole request."""
        for load in self.ask(layer, experts, **how):
            self.cache.finish(load)
        return self.answer()

    def stream(
        self,
        layer: int,
        experts: Sequence[int],
        *,
        window: int = 4,
        ahead: Sequence[tuple[int, int]] = (),
    ) -> list[Load]:
        """Open a stream's window; the loads to start."""
        self.request += 1
        self.step += 1
        self.cache.open_stream(
            *(self.request, self.step, layer, experts, window, (), self.applied, 0), ahead=ahead
        )
        return self.take()

    def take(self) -> list[Load]:
        """The loads that fell due; answers wait for `parts`."""
        due = self.cache.drain()
        due.answers = [*self.parts_due, *due.answers]
        self.parts_due = due.answers
        self.due = due
        return due.loads

    def parts(self) -> list[WindowAnswer]:
        """The parts of a stream's answer that are due; their changes count as applied."""
        self.take()
        parts, self.parts_due = self.parts_due, []
        for part in parts:
            self.applied = max(self.applied, part.table.to_version)
        return parts

    def run_stream(self, layer: int, experts: Sequence[int], *, window: int = 4) -> int:
        """Serve a whole stream, consuming what is named at once; how many were read."""
        loads = self.stream(layer, experts, window=window)
        n_reads = 0
        while True:
            parts = self.parts()
            loads += self.due.loads
            if any(part.final for part in parts):
                return n_reads
            for part in parts:
                named = [e for e, s in zip(part.experts, part.slots, strict=True) if s >= 0]
                if named:
                    self.cache.consume(part.request, named[-1])
            loads += self.take()
            if loads:
                self.cache.finish(loads.pop(0))
                n_reads += 1

    def restart(self, *, engine_may_live: bool = True) -> SlotCache:
        """The successor of a killed daemon."""
        self.cache = SlotCache.adopt(
            self.memory, self.new_policy(), self.limits, engine_may_live=engine_may_live
        )
        self.cache.check()
        return self.cache

    def ack(self) -> None:
        """The engine applies everything and says so; nothing runs on the device."""
        self.applied = self.cache.table_version
        self.cache.ack(self.applied, 0)

    def states(self) -> dict[str, int]:
        """How many slots are in each state that occurs."""
        found = self.memory.headers["state"].tolist()
        return {state.name: found.count(state) for state in SlotState if state in found}

    def resident(self) -> set[tuple[int, int]]:
        """The READY keys."""
        return {(layer, expert) for layer, expert, _ in self.cache.resident()}
