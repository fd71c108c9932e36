"""Where the golden tool's model gets experts and Engram rows: the real daemon, or the files."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from compute.commands.opening import opened
from compute.commands.terminal import Display
from compute.config import ComputeConfig
from compute.experts.miss_client import MissClient
from compute.model.sources import ExpertSource, RowSource
from protocol.files.checkpoint import open_checkpoint
from tests.support.local_sources import LocalSources


class BothSources(ExpertSource, RowSource, Protocol):
    """Experts and rows from one hand."""


class Sources(Protocol):
    """Gives a source for one forward pass at a time."""

    def step(self) -> contextlib.AbstractContextManager[BothSources]:
        """Lend the source for one pass."""
        ...


class FileSources:
    """Reads the checkpoint itself."""

    def __init__(self, directory: Path) -> None:
        self._source = LocalSources(open_checkpoint(directory))

    @contextlib.contextmanager
    def step(self) -> Iterator[BothSources]:
        """Lend the source."""
        yield self._source


class DaemonSources:
    """Asks a daemon, as the engine does."""

    def __init__(self, source: MissClient) -> None:
        self._source = source

    @contextlib.contextmanager
    def step(self) -> Iterator[BothSources]:
        """Begin and end a step of the daemon's client."""
        self._source.begin_step()
        yield self._source
        self._source.end_step()


@contextlib.contextmanager
def open_sources(directory: Path, *, local: bool) -> Iterator[Sources]:
    """A daemon of our own over the folder, gone at the end; or the files where `local` is set."""
    if local:
        yield FileSources(directory)
        return
    with tempfile.TemporaryDirectory(prefix="hr-golden-", dir="/tmp") as place:
        runtime_dir, state_dir = Path(place, "run"), Path(place, "state")
        runtime_dir.mkdir(mode=0o700)
        state_dir.mkdir(mode=0o700)
        config = ComputeConfig(model=str(directory), runtime_dir=runtime_dir, state_dir=state_dir)
        with opened(config, Display(quiet=True)) as ready:
            yield DaemonSources(ready.engine.source)
