"""One expert daemon, put together: from its settings to a server on a running loop.

`wrap_source` is the seam for tests that inject faults into reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import uvloop

from protocol.files.checkpoint import Checkpoint, open_checkpoint, resolve_model
from protocol.sd_notify import notify

from .arena import ARENA_NAME, Arena, ArenaOf, describe, open_arena
from .arena_plan import PlannedArena, keep_size, plan
from .arena_search import find_arena
from .arena_size import ArenaSize
from .cache import SlotCache
from .cache_parts import CacheLimits, CacheMemory
from .checksums import Checksums
from .config import DaemonConfig
from .exporter_child import check_exporter
from .fragments import expert_fragments, mirror_fragments, slot_pieces
from .lifetime import Lifetime
from .loading import ExpertLoading
from .lock import RuntimeLock, prepare_directory
from .log import log
from .metrics import Counters
from .model_state import ModelState, shards_stamp
from .policy import make_policy
from .policy_section import PolicySection
from .populate import available_bytes
from .quarantine import Quarantine
from .range_reader import BOUNCE_BYTES, RangeReader
from .read_faults import ReadFaults
from .reader import ExpertReader
from .reader_threads import ReaderThreads
from .rehash import Rehash
from .routing_trace import shape_of
from .row_table import RowTable
from .rows import serve_rows
from .server import Server
from .slots import SlotRooms
from .source import FileSource, Source
from .suspects import Suspects
from .tiers import TieredPolicy
from .trace import Tracing
from .tuned import Reading, choose_reading, material_of
from .upkeep import Upkeep
from .verified import Verified
from .works import Works

FINISH_S = 1.0  # how long the reads in hand are waited for at the end

WrapSource = Callable[[Source], Source]


class Daemon:
    """Everything that one daemon holds; `run` serves until `stop`."""

    def __init__(
        self,
        config: DaemonConfig,
        *,
        passed_arena: int | None = None,
        wrap_source: WrapSource | None = None,
    ) -> None:
        """Open the model, take the lock, map the arena and listen. Raises HeadraceError."""
        began = time.monotonic()
        if config.metrics:
            check_exporter()
        checkpoint = open_checkpoint(resolve_model(config.model))
        for note in (*checkpoint.warnings, *checkpoint.notes()):
            log(note)
        top_k_batch = checkpoint.config.top_k * config.batch
        planned = plan(
            checkpoint,
            size_bytes=config.arena_bytes,
            max_bytes=config.arena_max_bytes,
            top_k_batch=top_k_batch,
        )
        prepare_directory(config.runtime_dir)
        self._lock = RuntimeLock(config.lock_path)
        given = passed_arena
        if passed_arena is None:
            passed_arena = _look_for_arena(config, checkpoint.fingerprint)
        if passed_arena is not None:
            planned = keep_size(
                planned,
                passed_arena,
                checkpoint.fingerprint,
                top_k_batch,
                is_given=config.arena_bytes != 0,
            )
        fingerprint, stamp = checkpoint.fingerprint, shards_stamp(checkpoint.shards)
        self._state = ModelState(config.state_dir, fingerprint, stamp, save=not config.no_save)
        whose = ArenaOf(fingerprint, stamp, config.runtime_dir)
        self._arena = open_arena(planned, whose, passed_arena)
        self._is_kept = given is not None and self._arena.is_taken_over
        self._reading = _choose_reading(config, checkpoint)
        files: Source = FileSource(checkpoint.shards, direct=self._reading.mode == "direct")
        self._source = wrap_source(files) if wrap_source else files
        self._threads = ReaderThreads(self._reading.threads, BOUNCE_BYTES)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._loop = uvloop.new_event_loop()
        self._loop.set_exception_handler(self._end_on_bug)
        self._bug: BaseException | None = None
        works = self._make_works(config, checkpoint, planned)
        self.cache = works.loading.cache
        self._all_threads = (self._threads, works.rows.threads)
        self._tracing = works.tracing
        if config.trace is not None:
            self._tracing.start(config.trace)
        self._server = Server(config, self._loop, works)
        self._loop.add_reader(self._wake, self._take_reads)
        self._upkeep = Upkeep(config, self._loop, works, self._state)
        log(f"{describe(self._arena)}; ready after {time.monotonic() - began:.3f} s")

    def run(self, *, stop_on_signals: bool = False) -> None:
        """Serve until `stop`, or SIGTERM or SIGINT; then finish what is being read, if quick.

        Raises what was raised on the loop, which only a bug can bring about.
        """
        gc.collect()
        gc.freeze()
        self._loop.call_soon(self._begin, stop_on_signals)
        try:
            self._loop.run_forever()
        finally:
            self._finish()
        if self._bug is not None:
            raise self._bug

    def stop(self) -> None:
        """End `run`; may be called from any thread, and after the end."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _make_works(
        self, config: DaemonConfig, checkpoint: Checkpoint, planned: PlannedArena
    ) -> Works:
        arena, threads = self._arena, self._threads
        ranges = RangeReader(self._source, straight=arena.is_huge)
        pieces = slot_pieces(checkpoint)
        n_layers, n_experts = checkpoint.config.n_layers, checkpoint.config.n_experts
        checksums = Checksums(n_layers, n_experts, self._state, checkpoint.checksums)
        reader = ExpertReader(
            threads,
            ranges,
            expert_fragments(checkpoint),
            pieces,
            self._signal,
            checksums,
            self._reading.shape,
            mirror_fragments(checkpoint),
        )
        cache = _make_cache(config, checkpoint, planned, arena)
        _remember_checksums(arena, cache, checksums)
        faults = ReadFaults(cache, reader, Quarantine(n_layers, n_experts, self._state))
        tables = [RowTable(table, checkpoint.shards, ranges) for table in checkpoint.engram_tables]
        counters = Counters()
        rehash = Rehash(arena.view.headers, arena.slot, pieces, self._signal)
        suspects = Suspects(cache, rehash, Verified(arena.view.verified), counters)
        suspects.begin(all_slots=arena.is_suspect)
        hedges = planned.budget.hedge
        return Works(
            arena=arena,
            size=ArenaSize(
                arena,
                top_k_batch=checkpoint.config.top_k * config.batch,
                max_bytes=planned.max_bytes,
                max_from=planned.max_from,
            ),
            loading=ExpertLoading(cache, reader, arena, counters, faults, suspects, hedges),
            reader=reader,
            threads=threads,
            ranges=ranges,
            rows=serve_rows(tables, arena.view.ring, self._signal),
            tracing=Tracing(shape_of(checkpoint), config.trace_size_bytes),
            counters=counters,
            lifetime=Lifetime(arena.view.counters, is_adopted=arena.is_adopted),
            top_k_batch=checkpoint.config.top_k * config.batch,
            descriptor_path=config.descriptor_path,
            settings={
                "model": str(checkpoint.path),
                "policy": config.policy,
                "read_mode": self._reading.mode,
                "read_threads": self._reading.threads,
                "read_cut_bytes": self._reading.cut_bytes,
                "read_max_parts": self._reading.max_parts,
                "state_directory": str(self._state.directory),
                "prefetch": int(config.prefetch),
            },
        )

    def _end_on_bug(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End `run` by what no client may bring about: a successor takes over the arena."""
        caught = context.get("exception")
        self._bug = self._bug or caught or RuntimeError(str(context.get("message")))
        self._loop.stop()

    def _signal(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.eventfd_write(self._wake, 1)

    def _take_reads(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        self._server.take_reads()

    def _begin(self, stop_on_signals: bool) -> None:
        # On the running loop: a signal that came before it ran would be lost.
        if stop_on_signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self._loop.stop)
        self._upkeep.begin()
        identity = self._arena.identity
        if not self._is_kept:
            notify("FDSTOREREMOVE=1\nFDNAME=" + ARENA_NAME)
            notify("FDSTORE=1\nFDPOLL=0\nFDNAME=" + ARENA_NAME, [self._arena.descriptor])
        notify(f"READY=1\nSTATUS=serving, generation {identity.daemon_generation}")

    def _finish(self) -> None:
        notify("STOPPING=1")
        self._server.stop_receiving()
        self._tracing.close()
        ended = [threads.close(FINISH_S) for threads in self._all_threads]
        if all(ended):
            self._server.take_reads()
            self._source.close()
        else:
            log("a read does not return: the process ends without it")
        self._upkeep.close()
        self._arena.note_clean()
        self._server.close()
        self._loop.remove_reader(self._wake)
        self._loop.close()
        self._lock.close()
        log("stopped")


def _choose_reading(config: DaemonConfig, checkpoint: Checkpoint) -> Reading:
    """Return how experts are read, and say so."""
    what = material_of(checkpoint, available_bytes())
    choice = choose_reading(
        config.state_dir, what, mode=config.read_mode, threads=config.read_threads
    )
    log(f"{choice.reading.text}, {choice.why}")
    return choice.reading


def _look_for_arena(config: DaemonConfig, fingerprint: bytes) -> int | None:
    """Ask the processes that use a former daemon's arena for it, and say what came of it."""
    found = find_arena(config.runtime_dir, fingerprint)
    if found is None:
        log("a new, empty arena, as after a start of the machine: experts are read at first use")
        return None
    log(f"the arena of the last daemon is taken from process {found[1]}, which holds it")
    return found[0]


def _make_cache(
    config: DaemonConfig, checkpoint: Checkpoint, planned: PlannedArena, arena: Arena
) -> SlotCache:
    view = arena.view
    rooms = None
    if not view.layout.rooms.is_uniform:
        of_slot = [view.layout.rooms.room(slot) for slot in range(len(view.headers))]
        rooms = SlotRooms(of_slot, planned.layer_rooms)
    memory = CacheMemory(view.table, view.headers, view.table_sequence, view.table_version, rooms)
    policy = TieredPolicy(make_policy(config.policy, checkpoint.config.n_keys), view.tier)
    limits = CacheLimits(
        planned.budget.free_pool,
        planned.budget.lease_quota,
        n_slots=planned.n_slots,
        follow_hints=config.prefetch,
    )
    if not arena.is_adopted:
        return SlotCache.empty(memory, policy, limits)
    PolicySection(view.policy, checkpoint.config.n_keys).load(policy)
    return SlotCache.adopt(memory, policy, limits, engine_may_live=arena.engine_pid != 0)


def _remember_checksums(arena: Arena, cache: SlotCache, checksums: Checksums) -> None:
    """Hold later reads to the checksums of what a predecessor read."""
    found = arena.view.headers["checksum"]
    for layer, expert, slot in cache.resident():
        checksums.learn(layer, expert, int(found[slot]))
