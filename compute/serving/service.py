"""The compute service from its settings to its end: model, daemon, queue, sockets, worker."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import FrameType

from compute.assembly import make_engine
from compute.config import ComputeConfig
from compute.connecting import connect_engine
from compute.experts.miss_client import Waiting
from compute.frontend.gguf_tokenizer import gguf_tokenizer
from compute.frontend.token_map import TOKENIZER_NAME
from compute.grammar import Grammars
from compute.load import load_model
from compute.prefix.kept import kept_prefixes
from compute.session import Engine
from protocol.files.checkpoint import Checkpoint, open_checkpoint, resolve_model
from protocol.runtime_lock import RuntimeLock, prepare_directory
from protocol.sd_notify import notify
from protocol.watchdog import Watchdog
from protocol.wire.messages import Values
from protocol.wire.sockets import RuntimePaths

from .jobs import JobQueue
from .server import Model, Server
from .worker import Worker

_LOG = logging.getLogger("headrace.compute")
_REQUESTS = "the requests' loop"
_FRONTENDS = "the frontends' loop"


def serve(config: ComputeConfig, environment: Mapping[str, str]) -> None:
    """Serve one model until SIGTERM or SIGINT. Raises HeadraceError where it cannot begin."""
    checkpoint = open_checkpoint(resolve_model(config.model))
    runtime_dir = config.find_runtime_dir(environment)
    prepare_directory(runtime_dir)
    paths = RuntimePaths.of_compute(runtime_dir)
    with contextlib.ExitStack() as stack:
        lock = RuntimeLock(paths.lock, "compute service")
        stack.callback(lock.close)
        model = load_model(checkpoint, config)
        client = stack.enter_context(
            connect_engine(runtime_dir, checkpoint, config.daemon_wait_s, say=_LOG.warning)
        )
        waiting = Waiting(daemon_wait_s=config.daemon_wait_s)
        prefixes = stack.enter_context(kept_prefixes(config, checkpoint))
        engine = make_engine(checkpoint, config, model, client, waiting, prefixes)
        _run(config, checkpoint, paths, engine)


def _run(
    config: ComputeConfig, checkpoint: Checkpoint, paths: RuntimePaths, engine: Engine
) -> None:
    own = checkpoint.config
    queue = JobQueue(config.max_waiting)
    report = _Report(engine, queue)
    model = Model(checkpoint.fingerprint, own.vocab_size, engine.context)
    watchdog = Watchdog(_REQUESTS, _FRONTENDS)
    beat, tiers = partial(watchdog.beat, _FRONTENDS), engine.source.tiers
    server = Server(paths, model, queue, report.values, beat, tiers)
    grammars = Grammars(tokenizer_text(checkpoint), own.vocab_size, own.eos_id)
    worker = Worker(engine, queue, grammars, server.send, partial(watchdog.beat, _REQUESTS))
    report.attach(worker, server)

    def stop(_signal: int, _frame: FrameType | None) -> None:
        server.stop_jobs()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    server.start()
    notify("READY=1")
    _LOG.info("serving %s", checkpoint.path)
    try:
        worker.run()
    finally:
        notify("STOPPING=1")
        server.close()


def tokenizer_text(checkpoint: Checkpoint) -> Path | Callable[[], str]:
    """Return the model's tokenizer.json, or what writes one from a GGUF's metadata."""
    path, gguf = checkpoint.directory / TOKENIZER_NAME, checkpoint.gguf
    if gguf is None or path.is_file():
        return path
    index = gguf.index

    def written() -> str:
        text: str = gguf_tokenizer(index).to_str()
        return text

    return written


class _Report:
    """What Status is answered with. Read on the server's thread, without a lock: only for eyes."""

    def __init__(self, engine: Engine, queue: JobQueue) -> None:
        self._engine = engine
        self._queue = queue
        self._started = time.monotonic()
        self._worker: Worker | None = None
        self._server: Server | None = None

    def attach(self, worker: Worker, server: Server) -> None:
        """Report on these two as well."""
        self._worker, self._server = worker, server

    def values(self) -> Values:
        """Return names and values of the moment."""
        running = self._queue.running
        source, prefixes = self._engine.source, self._engine.prefixes
        welcome, decoding = source.client.welcome, self._engine.decoding
        graphs: Values = {} if decoding is None else dict(decoding.values())
        return graphs | {
            "state": "idle" if running is None else "running",
            "n_waiting": self._queue.n_waiting,
            "n_done": 0 if self._worker is None else self._worker.n_done,
            "n_frontends": 0 if self._server is None else self._server.n_sessions,
            "n_daemons_lost": source.n_daemons_lost,
            "daemon_lost": source.client.lost,
            "hits": source.io.hits,
            "misses": source.io.misses,
            "bytes_read": source.io.bytes_read,
            "stall_ms": source.io.stall_ms,
            "copy_ms": source.io.copy_ms,
            "n_layers": welcome.n_layers,
            "n_experts": welcome.n_experts,
            "n_slots": welcome.n_slots,
            "slot_bytes": welcome.slot_bytes,
            "prefix_bytes": 0 if prefixes is None else prefixes.tree.n_bytes,
            "prefix_states": 0 if prefixes is None else prefixes.tree.n_fronts,
            "context": self._engine.context,
            "chunk": self._engine.chunk,
            "device": str(self._engine.model.device),
            "up_s": time.monotonic() - self._started,
        }
