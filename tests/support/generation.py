"""One greedy generation over a daemon that runs already, and the same in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

PROMPT = (0, 209, 711, 63, 1288, 278)
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "compute.session", "compute.load", __name__])


def generate(
    runtime_dir: Path, n_tokens: int, *, model: str = "demo", precision: str = "unrounded"
) -> dict[str, Any]:
    """Greedy ids after PROMPT with their io counters; never starts a daemon of its own."""
    from compute.commands.opening import opened
    from compute.commands.terminal import Display
    from compute.config import ComputeConfig
    from compute.sampler import Sampling
    from compute.session import Finished, NewToken, Request

    config = ComputeConfig(
        model=model, precision=precision, runtime_dir=runtime_dir, daemon_wait_s=20
    )
    ids: list[int] = []
    with opened(config, Display(quiet=True)) as ready:
        assert ready.daemon.child is None
        for event in ready.engine.generate(Request(PROMPT, Sampling(temperature=0), n_tokens)):
            if isinstance(event, NewToken):
                ids.append(event.choice.id)
    assert isinstance(event, Finished)
    io = event.io
    return {"ids": ids, "hits": io.hits, "misses": io.misses, "bytes_read": io.bytes_read}


class GeneratingProcess:
    """A process that generates and can be killed; it begins within a few milliseconds."""

    def __init__(self, runtime_dir: Path, n_tokens: int, **settings: Any) -> None:
        self._results, theirs = _CONTEXT.Pipe(duplex=False)
        arguments = (theirs, runtime_dir, n_tokens, settings)
        self.process: ForkServerProcess = _CONTEXT.Process(target=_send, args=arguments)
        self.process.start()
        theirs.close()

    def kill(self) -> None:
        """kill -9, and wait."""
        self.process.kill()
        self.process.join(10)

    def has_ended(self, within_s: float) -> bool:
        """Whether it generated to its end within this time."""
        return self._results.poll(within_s)

    def result(self, timeout_s: float = 60) -> dict[str, Any]:
        """What `generate` returned."""
        assert self.has_ended(timeout_s), "the generation did not end"
        found: dict[str, Any] = self._results.recv()
        self.process.join(10)
        return found

    def close(self) -> None:
        """End it in any case."""
        self.kill()
        self._results.close()


def _send(results: Connection, runtime_dir: Path, n_tokens: int, settings: dict[str, Any]) -> None:
    os.setpgid(0, 0)
    results.send(generate(runtime_dir, n_tokens, **settings))
