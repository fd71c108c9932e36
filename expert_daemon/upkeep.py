"""What a daemon sees to beside serving: what it saves, counts for good, and shows to others.

`begin` and `close` and the ticks between them run on the loop's thread.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict

from protocol.watchdog import Watchdog

from .config import DaemonConfig
from .exporter_child import ExporterChild
from .hot_list import HotList
from .model_state import ModelState
from .policy_section import PolicySection
from .saver import Saver
from .works import Works

TICK_S = 0.5
_LOOP = "the daemon's loop"


class Upkeep:
    """Saves every minute, counts and shows life twice a second, keeps the exporter running."""

    def __init__(
        self,
        config: DaemonConfig,
        loop: asyncio.AbstractEventLoop,
        works: Works,
        state: ModelState,
    ) -> None:
        self._loop = loop
        self._works = works
        hot_list = HotList(state, works.arena.view.headers)
        quarantine = works.loading.faults.quarantine
        jobs = [quarantine.save, works.reader.checksums.save, hot_list.save]
        self._saver = Saver(jobs, wanted=quarantine.changed)
        self._exporter: ExporterChild | None = None
        if config.metrics:
            self._exporter = ExporterChild(config.runtime_dir, config.metrics)
        view = works.arena.view
        self._policy_section = PolicySection(view.policy, view.layout.n_keys)
        self._watchdog = Watchdog(_LOOP)
        self._next_tick: asyncio.TimerHandle | None = None
        self._noted: dict[str, int | float | str] = {}

    def begin(self) -> None:
        """Start; the daemon serves by now."""
        self._tick()

    def close(self) -> None:
        """Save and count a last time, end what runs beside."""
        if self._next_tick is not None:
            self._next_tick.cancel()
        if self._exporter is not None:
            self._exporter.close()
        self._works.loading.suspects.close()
        self._saver.close()
        self._note()

    def _tick(self) -> None:
        self._next_tick = self._loop.call_later(TICK_S, self._tick)
        self._watchdog.beat(_LOOP)
        if self._exporter is not None:
            self._exporter.tend()
        self._note()

    def _note(self) -> None:
        """Write into the arena what a successor is to go on from."""
        works = self._works
        own = asdict(works.loading.cache.counters) | works.counters.values()
        if own == self._noted:
            return  # whatever changes the policy is counted
        self._noted = own
        works.lifetime.note(own)
        self._policy_section.save(works.loading.cache.policy)
