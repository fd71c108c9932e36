"""Runs the queue's jobs on the engine, on the thread that owns the model.

Invariants: every job that was taken ends with exactly one Done; a job that fails leaves the engine
ready for the next; while nothing runs, the daemon's changes are acknowledged.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

from compute.experts.miss_client import IoCounters
from compute.grammar import Grammars
from compute.session import Engine, Event, Finished, NewToken, Prefilled, Request
from protocol.errors import ConfigError, DaemonLost, HeadraceError, ShardError
from protocol.wire.messages import Done, Message, Progress, Tokens, Values

from .jobs import Job, JobQueue

_LOG = logging.getLogger("headrace.compute")
_IDLE_S = 0.04  # the daemon counts on an Ack within 50 ms
_MAX_TEXT = 2000


class Worker:
    """The loop of the main thread.

    send   puts a message in the outbox: (session, message)
    beat   called whenever the loop, or a request that runs in it, has got on
    """

    def __init__(
        self,
        engine: Engine,
        queue: JobQueue,
        grammars: Grammars,
        send: Callable[[int, Message], None],
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._queue = queue
        self._grammars = grammars
        self._send = send
        self._beat = beat
        self.n_done = 0

    def run(self) -> None:
        """Run jobs until the queue is closed."""
        while not self._queue.is_closed:
            self._beat()
            job = self._queue.take(_IDLE_S)
            if job is None:
                with contextlib.suppress(DaemonLost):  # the next job recovers
                    self._engine.source.take_changes()
                continue
            try:
                done = self._done(job)
            finally:
                self._queue.end(job)
            self.n_done += 1
            self._send(job.session, done)

    def _done(self, job: Job) -> Done:
        run = _JobRun(self._engine, job, self._send, self._beat)
        try:
            finished = run.finished(self._grammars)
        except HeadraceError as error:
            _LOG.warning("request %d of session %d: %s", job.id, job.session, error)
            usage = run.usage() | {"fault": _fault(error), "text": str(error)[:_MAX_TEXT]}
            return Done(job.id, "error", usage)
        reason = finished.reason
        if reason == "cancelled" and not job.is_cancelled:
            reason = "deadline"
        return Done(job.id, reason, run.usage(finished))


class _JobRun:
    """One job and what it has cost so far."""

    def __init__(
        self,
        engine: Engine,
        job: Job,
        send: Callable[[int, Message], None],
        beat: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._job = job
        self._send = send
        self._beat = beat
        self._began = time.monotonic()
        self._io_told = self._io_before = engine.source.io.copy()

    def finished(self, grammars: Grammars) -> Finished:
        """Generate; what comes is sent at once. Raises HeadraceError."""
        job, wishes = self._job, self._job.wishes
        request = Request(
            job.prompt_ids,
            wishes.sampling,
            max_tokens=self._engine.context if wishes.max_tokens is None else wishes.max_tokens,
            stop_ids=wishes.stop_ids,
            logprobs=wishes.logprobs,
            rules=wishes.rules(grammars),
            cancelled=self._is_cancelled,
        )
        self._send(job.session, Progress(job.id, 0, len(job.prompt_ids)))
        for event in self._engine.generate(request):
            if isinstance(event, Finished):
                return event
            self._send(job.session, self._message(event))
        raise AssertionError("a generation ended without Finished")

    def _is_cancelled(self) -> bool:
        self._beat()  # asked before each window and each layer
        return self._job.should_stop()

    def _message(self, event: Event) -> Message:
        if isinstance(event, Prefilled):
            return Progress(self._job.id, event.n_done, event.n_prompt)
        assert isinstance(event, NewToken)
        choice = event.choice
        return Tokens(
            id=self._job.id,
            ids=(choice.id,),
            logprobs=() if choice.logprob is None else (_finite(choice.logprob),),
            io=self._io_since_told(),
            top_ids=tuple(token_id for token_id, _ in choice.top),
            top_logprobs=tuple(_finite(logprob) for _, logprob in choice.top),
        )

    def _io_since_told(self) -> Values:
        now = self._engine.source.io.copy()
        since, self._io_told = now.since(self._io_told), now
        return _io_values(since)

    def usage(self, finished: Finished | None = None) -> Values:
        """What it cost, for Done."""
        job = self._job
        io = self._engine.source.io.copy().since(self._io_before)
        return {
            "n_prompt": len(job.prompt_ids),
            "n_cached": 0 if finished is None else finished.n_cached,
            "n_new": 0 if finished is None else finished.n_new,
            "queue_ms": 1000 * (self._began - job.arrived),
            "prefill_ms": 0.0 if finished is None else 1000 * finished.prefill_s,
            "decode_ms": 0.0 if finished is None else 1000 * finished.decode_s,
            **_io_values(io),
        }


def _io_values(io: IoCounters) -> Values:
    device = {"hits_device": io.hits_device} if io.hits_device else {}
    return {
        "hits": io.hits,
        "hits_arena": io.hits - io.hits_device,
        **device,
        "misses": io.misses,
        "bytes_read": io.bytes_read,
        "stall_ms": io.stall_ms,
        "copy_ms": io.copy_ms,
    }


def _finite(logprob: float) -> float:
    """A log-probability that the wire can carry: -inf is one of an id that cannot come."""
    return max(logprob, -1e9)


def _fault(error: HeadraceError) -> str:
    if isinstance(error, ConfigError):
        return "request"
    return "shard" if isinstance(error, ShardError) else "daemon"
