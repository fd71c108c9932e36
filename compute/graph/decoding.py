"""The decoding of one engine: one sequence's memory, reused, and the runner on it.

Owns the sequence that launches write to, so that what graphs bake in stays where it is from one
request to the next. Used by the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compute.experts.device_experts import DeviceExperts
from compute.model.chunk_check import ChunkCheck
from compute.model.model import Model
from compute.model.sequence import Sequence
from compute.sampler import Sampling

from .guess_writer import GuessWriter
from .hashes import Tracer
from .recording import GraphCounters
from .runner import Runner
from .timings import StepTimer


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """How tokens are launched."""

    mode: str  # one of launches.MODES
    boundaries: str = "auto"  # one of segments.KINDS
    side_streams: bool = True  # whether what can run beside the rest of a layer does so
    log: Callable[[str], None] | None = None  # takes running counts and a line a miss
    trace: Callable[[str], None] | None = None  # takes the hashes of every segment
    timings: Callable[[str], None] | None = None  # takes a line a token
    checks: bool = False  # whether every layer's routing is compared with the host's
    lookahead: int = 0  # layers behind a segment whose picks are guessed
    guesses: GuessWriter | None = None  # takes each token's picks and guesses


class Decoding:
    """Decodes single tokens of the engine's sequence by launches."""

    def __init__(
        self, model: Model, experts: DeviceExperts, context: int, settings: GraphSettings
    ) -> None:
        self._sequence = Sequence(model.config, context, model.device, model.precision)
        model.checks = ChunkCheck(self._note_checked) if settings.checks else None
        tracer = None if settings.trace is None else Tracer(settings.trace)
        timer = None if settings.timings is None else StepTimer(model.device, settings.timings)
        self._runner = Runner(
            model,
            self._sequence,
            experts,
            mode=settings.mode,
            boundaries=settings.boundaries,
            side_streams=settings.side_streams,
            tracer=tracer,
            timer=timer,
            log=settings.log,
            checks=settings.checks,
            lookahead=settings.lookahead,
            guesses=settings.guesses,
        )

    def _note_checked(self, n_tokens: int) -> None:
        """Count a layer's decisions of a prompt's chunk."""
        self.counters.routes_checked += n_tokens

    @property
    def counters(self) -> GraphCounters:
        """How often graphs were replayed, and what else."""
        return self._runner.counters

    @property
    def mode(self) -> str:
        """How tokens are launched now."""
        return self._runner.mode

    def values(self) -> dict[str, int | str]:
        """Return mode and counts by name, for reports."""
        return {"graph_mode": self.mode} | {
            f"graph_{name}": value for name, value in self.counters.values().items()
        }

    def new_sequence(self) -> Sequence:
        """Return the sequence, empty; who had it before has it no more."""
        self._runner.finish()
        self._sequence.reset()
        return self._sequence

    def takes(self, sequence: Sequence) -> bool:
        """Whether the sequence's tokens go by launches."""
        return sequence is self._sequence

    def expect(self, token: int) -> None:
        """Ask early for what the step with this token needs."""
        self._runner.expect(token)

    def step(self, token: int, sampling: Sampling | None = None) -> NextLogits:
        """Take a token into the sequence. Raises as Runner.step does."""
        self._runner.step(token, sampling)
        return NextLogits(self._runner)

    def finish(self) -> None:
        """End a request."""
        self._runner.finish()


class NextLogits:
    """What the last step left on the device; valid until the next."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def likeliest(self) -> int:
        """Return the id of the largest logit. Raises ShardError on a NaN."""
        return self._runner.likeliest()

    def drawn(self) -> int:
        """Return the id that the step drew. Raises ShardError on a NaN."""
        return self._runner.drawn()

    def values(self) -> NDArray[np.float32]:
        """Return the logits [vocab] f32."""
        return self._runner.logits()
