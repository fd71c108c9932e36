"""The compute service without a model: its own sockets and queue, an output that a test wrote."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compute.serving.jobs import Job, JobQueue
from compute.serving.server import Model, Server
from protocol.wire.messages import Done, Progress, Tokens
from protocol.wire.sockets import RuntimePaths

FINGERPRINT = b"f" * 16


class ScriptedCompute:
    """Answers every Generate with `says`, cut at its max_tokens; stops at the stop ids."""

    def __init__(
        self,
        runtime_dir: Path,
        *,
        fingerprint: bytes = FINGERPRINT,
        vocab_size: int = 4096,
        context: int = 4096,
        max_waiting: int = 4,
    ) -> None:
        self.says: list[int] = []
        self.error: tuple[str, str] | None = None  # (fault, text): every Generate ends so
        self.token_s = 0.0
        self.gate = threading.Event()  # nothing is said while it is not set
        self.gate.set()
        self.jobs: list[Job] = []
        self.ends: list[str] = []
        self.queue = JobQueue(max_waiting)
        model = Model(fingerprint, vocab_size, context)
        paths = RuntimePaths.of_compute(runtime_dir)
        status: dict[str, int | float | str] = {"state": "scripted", "n_layers": 2, "n_experts": 3}
        self.server = Server(
            paths, model, self.queue, lambda: status, tiers=lambda: bytes([0, 1, 1, 0, 0, 2])
        )
        self.server.start()
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.server.stop_jobs()
        self.gate.set()
        self._thread.join(5)
        self.server.close()

    def _run(self) -> None:
        while not self.queue.is_closed:
            job = self.queue.take(0.02)
            if job is None:
                continue
            self.jobs.append(job)
            self.server.send(job.session, Progress(job.id, 0, len(job.prompt_ids)))
            done = self._done(job)
            self.queue.end(job)
            self.ends.append(done.reason)
            self.server.send(job.session, done)

    def _done(self, job: Job) -> Done:
        n_new, reason = 0, "length"
        most = len(self.says) if job.wishes.max_tokens is None else job.wishes.max_tokens
        for token_id in self.says[:most]:
            if self._waits(job):
                reason = "cancelled" if job.is_cancelled or self._closed else "deadline"
                break
            n_new += 1
            self._say(job, token_id)
            if token_id in job.wishes.stop_ids:
                reason = "stop"
                break
        usage: dict[str, int | float | str] = {
            "n_prompt": len(job.prompt_ids),
            "n_cached": 0,
            "n_new": n_new,
            "queue_ms": 1.0,
            "prefill_ms": 10.0,
            "decode_ms": 10.0,
            "hits": 6 * n_new,
            "hits_arena": 6 * n_new,
            "misses": 2,
            "bytes_read": 100,
            "stall_ms": 0.5,
            "copy_ms": 0.25,
        }
        if self.error is not None:
            reason = "error"
            usage |= {"fault": self.error[0], "text": self.error[1]}
        return Done(job.id, reason, usage)

    def _waits(self, job: Job) -> bool:
        """Wait for the gate; True where nobody waits for the job any more."""
        ends = time.monotonic() + self.token_s
        while not job.should_stop():
            if time.monotonic() >= ends and self.gate.wait(0.005):
                break
        # Once closed the gate opens, maybe before the job is told to stop.
        return job.should_stop() or self._closed

    def _say(self, job: Job, token_id: int) -> None:
        wishes = job.wishes
        n_top = wishes.sampling.top_logprobs
        self.server.send(
            job.session,
            Tokens(
                id=job.id,
                ids=(token_id,),
                logprobs=(-0.5,) if wishes.logprobs else (),
                io={"hits": 6, "hits_arena": 6, "misses": 0, "bytes_read": 0, "stall_ms": 0.0},
                top_ids=tuple(range(20, 20 + n_top)),
                top_logprobs=tuple(-1.0 - place for place in range(n_top)),
            ),
        )


@contextlib.contextmanager
def scripted_compute(runtime_dir: Path, **settings: Any) -> Iterator[ScriptedCompute]:
    """A ScriptedCompute, closed at the end."""
    compute = ScriptedCompute(runtime_dir, **settings)
    try:
        yield compute
    finally:
        compute.close()
