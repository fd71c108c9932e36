"""An engine ready to generate, from settings: checkpoint, daemon, model, connection, in that order.

The checkpoint is opened and checked before torch is imported, so that a model of a type that
headrace does not know is refused at once; a daemon that must be started starts while the dense
weights are read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compute.config import ComputeConfig
from protocol.files.checkpoint import Checkpoint, open_checkpoint, resolve_model

from .children import DaemonInUse, daemon_in_use
from .terminal import Display

if TYPE_CHECKING:
    from compute.frontend.tokenizer import Tokenizer
    from compute.session import Engine


@dataclass(frozen=True, slots=True)
class Opened:
    """What a command works with."""

    config: ComputeConfig
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    engine: Engine
    daemon: DaemonInUse

    @property
    def bos_id(self) -> int:
        """The id that every text begins with."""
        begin = self.tokenizer.special.begin
        return self.checkpoint.config.bos_id if begin is None else begin

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end a text."""
        end = self.tokenizer.special.end
        return frozenset({self.checkpoint.config.eos_id if end is None else end})


@contextlib.contextmanager
def opened(config: ComputeConfig, display: Display, *, keep: bool = False) -> Iterator[Opened]:
    """Open everything that a generation needs, and close it at the end.

    keep   states are kept, as the settings say, for requests that begin as earlier ones do
    """
    from compute.frontend.tokenizer import Tokenizer

    checkpoint = open_checkpoint(resolve_model(config.model))
    tokenizer = Tokenizer.of(checkpoint)
    for note in (*checkpoint.warnings, *checkpoint.notes()):
        display.line(note)
    environment = os.environ
    with contextlib.ExitStack() as stack:
        with display.loading(config.model):
            daemon = stack.enter_context(daemon_in_use(config, checkpoint.path, environment))
            if daemon.child is None:
                _wait_for_turn(config, checkpoint, daemon, display)
            else:
                where = "" if daemon.looked_in is None else f" in {daemon.looked_in}"
                display.progress_line(f"no daemon{where}: starting one for this run")
            engine = _load(config, checkpoint, daemon, stack, display, keep=keep)
        yield Opened(config, checkpoint, tokenizer, engine, daemon)


def _wait_for_turn(
    config: ComputeConfig, checkpoint: Checkpoint, daemon: DaemonInUse, display: Display
) -> None:
    """Wait until no other engine holds the daemon, before minutes go into loading weights."""
    from compute.connecting import connect_engine

    wait_s = config.daemon_wait_s
    connect_engine(daemon.runtime_dir, checkpoint, wait_s, daemon.tend, display.line).close()


def _load(
    config: ComputeConfig,
    checkpoint: Checkpoint,
    daemon: DaemonInUse,
    stack: contextlib.ExitStack,
    display: Display,
    *,
    keep: bool,
) -> Engine:
    from compute.assembly import make_engine
    from compute.connecting import connect_engine
    from compute.experts.miss_client import Waiting
    from compute.load import find_context, load_model
    from compute.prefix.kept import kept_prefixes

    find_context(checkpoint, config)  # refused before anything is loaded
    model = load_model(checkpoint, config)
    client = stack.enter_context(
        connect_engine(
            daemon.runtime_dir, checkpoint, config.daemon_wait_s, daemon.tend, display.line
        )
    )
    waiting = Waiting(
        daemon_wait_s=config.daemon_wait_s, tend=daemon.tend, attached=daemon.attached
    )
    prefixes = stack.enter_context(kept_prefixes(config, checkpoint)) if keep else None
    return make_engine(checkpoint, config, model, client, waiting, prefixes)
