"""Decodes one token after the other by segments, and repairs what a missing expert spoiled.

A segment is launched piece by piece, without a wait. Its layers' headers come into the host's
memory while it runs; the first layer with an absent pick is fetched for, runs again from its
experts on, and so do the layers after it, up to the segment's end; then the headers are looked at
again. A layer without a flag never runs again, so each request is progress. What a token leaves to
be said is said beside the next one's first segments.
Invariants: the host waits for headers, and for the device at a token's end; while a request for
experts is open nothing runs on the device but copies and layers that will run again, whose results
nobody keeps; the daemon's changes are taken where the device is idle, and acknowledged when all
that runs was launched after; results are those of the same launches without any miss. Source:
DESIGN.md, section 3, but that a request need not wait for the end of what is to run again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray

from compute.experts.device_experts import DeviceExperts
from compute.model.model import Model
from compute.model.sequence import Sequence
from compute.sampler import Sampling
from protocol.errors import ConfigError, ShardError

from .decode_step import DecodeStep
from .foresight import Foresight
from .guess_writer import GuessWriter
from .hashes import Trace
from .headers import Headers
from .launches import BY_LAYER, Launches
from .next_id import NextId
from .recording import GraphCounters
from .route_check import RouteCheck
from .row_feed import RowFeed
from .segments import Boundaries, MissRate, Segment, pieces
from .step_buffers import StepBuffers
from .timings import StepTimer

_MOST_HINTS = 64
_LAYERS_A_PART = 2  # that the device computes while the host does a part of its report
_LOG_STEPS = 32  # between two lines of counts


class Runner:
    """`step` takes one token into the sequence; then `logits`, `likeliest` and `drawn` are there.

    mode          as `Launches` has it; oracle: each segment is compared with its eager run bit by
                  bit
    boundaries    kind of the segments' boundaries
    side_streams  whether what can run beside the rest of a layer does so
    tracer        is shown the streams at the end of every segment
    timer         measures parts, which are then launched one by one
    log           takes running counts and a line a miss
    checks        whether every layer's routing is compared with the host's
    lookahead     layers behind a segment whose picks are guessed and told as hints; 0: none
    guesses       takes each token's picks and what earlier layers' inputs would have picked
    """

    def __init__(
        self,
        model: Model,
        sequence: Sequence,
        experts: DeviceExperts,
        *,
        mode: str = "segment",
        boundaries: str = "auto",
        side_streams: bool = True,
        tracer: Trace | None = None,
        timer: StepTimer | None = None,
        log: Callable[[str], None] | None = None,
        checks: bool = False,
        lookahead: int = 0,
        guesses: GuessWriter | None = None,
    ) -> None:
        config = self._config = model.config
        self.counters = GraphCounters()
        self._model = model
        self._experts = experts
        n_ahead = max(lookahead, 0 if guesses is None else guesses.n_distances)
        self._step = DecodeStep(
            model, sequence, experts.places, beside=side_streams, n_ahead=n_ahead
        )
        self._guesses = guesses
        self._foresight: Foresight | None = None
        if self._step.ahead is not None and lookahead:
            self._foresight = Foresight(self._step.ahead, experts, lookahead, self.counters)
        self._launches = Launches(self._step, experts.places, mode, self.counters, timer)
        self._rate = MissRate(Boundaries.of(config, boundaries))
        self._headers = Headers(self._step.buffers.headers, config.n_experts)
        self._rows = RowFeed(model.hash, experts, self._step.engram)
        self._check_routes: RouteCheck | None = None
        if checks:
            buffers = self._step.buffers
            self._check_routes = RouteCheck(model, buffers, experts.places, self.counters)
        self._tracer = tracer
        self._timer = timer
        self._log = log
        self._next_id = NextId(self._step.buffers, self._launches)
        self._steps = 0
        self._n_missed = 0  # misses before the token in hand
        self._expected = -1  # the token whose rows are asked for
        self._n_begun = 0  # steps that the experts had begun then

    @property
    def mode(self) -> str:
        """The mode; eager from where a capture failed that segments need."""
        return self._launches.mode

    @property
    def sequence(self) -> Sequence:
        """The sequence whose state the launches use."""
        return self._step.sequence

    @property
    def buffers(self) -> StepBuffers:
        """What the last step left on the device; valid until the next."""
        return self._step.buffers

    def logits(self) -> NDArray[np.float32]:
        """Return the logits [vocab] f32 of the last step."""
        with self._on_host("sampling"):
            row: NDArray[np.float32] = self._step.buffers.logits[0].cpu().numpy()
        return row

    def likeliest(self) -> int:
        """Return the id of the last step's largest logit. Raises ShardError on a NaN."""
        return self._next_id.likeliest()

    def drawn(self) -> int:
        """Return the id that the last step drew, as it was told to. Raises ShardError on a NaN."""
        return self._next_id.drawn()

    def expect(self, token: int) -> None:
        """Ask for the Engram rows of the token that `step` will take in next."""
        self._check(token)
        self._expected = -1  # what was asked for is dropped
        self._experts.begin_step()
        self._rows.ask(self.sequence, token)
        self._expected, self._n_begun = token, self._experts.n_begun

    @torch.inference_mode()
    def step(self, token: int, sampling: Sampling | None = None) -> None:
        """Take the token in. Raises ConfigError before anything, else what the experts raise.

        sampling  how the id after it is drawn, with a temperature above 0; None: it is not

        Whatever it raises, nothing runs on the device then, and the sequence is as it was.
        """
        sequence, step = self.sequence, self._step
        if (self._expected, self._n_begun) != (token, self._experts.n_begun):
            self.expect(token)  # or once more: another sequence's step has dropped its rows
        self._expected = -1
        self._next_id.expect(sequence.position, sampling)
        self._launches.begin()
        inputs = step.buffers.staged_inputs.numpy()
        inputs[0], inputs[1] = token, sequence.position
        step.extend_reach(sequence.position)
        self._experts.take_arrived()
        if self._foresight is not None:
            self._foresight.begin()
        if self._timer is not None:
            self._timer.begin(sequence.position)
        self._n_missed, n_flagged = self._experts.io.misses, 0
        for segment in self._segments():
            try:
                n_flagged += self._run_segment(*segment)
            except BaseException:
                self._wait()  # what was launched before reads the arena
                if self._timer is not None:
                    self._timer.drop()
                raise
        picks = self._headers.all_picks()
        self._rate.note(n_flagged)
        if self._log is not None and self._steps % _LOG_STEPS == 0:
            self._log(self.counters.line())
        if self._guesses is not None and step.ahead is not None:
            guesses = step.ahead.all_guesses()[:, : self._guesses.n_distances]
            self._guesses.take(sequence.position, picks, guesses)
        self._steps += 1
        self._rows.take_in(sequence)
        sequence.position += 1
        self._experts.end_token(
            picks,
            self._experts.io.misses - self._n_missed,
            self._headers.n_below(self._experts.places.n_device),
        )

    def assume_misses(self, n_layers: int) -> None:
        """Take it that so many layers of a token miss, until tokens show what is true."""
        self._rate.assume(n_layers)

    def finish(self) -> None:
        """End a request: nothing of it is left to be said. The device is idle."""
        self._expected = -1
        self._experts.report()
        self._experts.take_arrived()
        self._step.begin()
        if self._timer is not None:
            self._timer.finish()
        if self._guesses is not None:
            self._guesses.flush()
        if self._log is not None and self._check_routes is not None and self._steps:
            self._log(self.counters.line())

    # parts of a step

    def _segments(self) -> list[Segment]:
        if self.mode in BY_LAYER:
            return [(layer, layer + 1) for layer in range(self._config.n_layers)]
        return self._rate.segments()

    def _run_segment(self, first: int, end: int) -> int:
        """Launch a segment and whatever its misses ask for; return its flagged layers."""
        if self._foresight is not None and first:
            self._experts.take_arrived()  # what was hinted may be there
        for piece in pieces(first, end):
            self._launch_piece(*piece)
        for _ in range(first, end, _LAYERS_A_PART):
            self._experts.report_part()
        if end == self._config.n_layers:
            self._experts.begin_copies()  # no miss of this token gave them time
        n_flagged = self._repair_all(first, end)
        if self.mode == "oracle":
            self._compare(first, end)
        if self._tracer is not None:
            self._tracer.segment(self.sequence.position, first, end, self._step.buffers)
        return n_flagged

    def _launch_piece(self, first: int, end: int) -> None:
        if any(first <= layer < end for layer in self._config.engram_layers):
            with self._on_host("engram"):
                self._rows.hand_over()
        # Waiting for rows may have found another daemon.
        self._settle(first, end, is_busy=first > 0)
        self._launches.layers(first, end)

    def _settle(self, first: int, end: int, *, is_busy: bool = True) -> None:
        """Before layers first to end - 1 are launched: bring what they read up to date."""
        self._experts.settle(is_busy=is_busy)
        self._expect(first, end)

    def _expect(self, first: int, end: int) -> None:
        """Layers first to end - 1 are launched next, with the table as it is now."""
        self._headers.expect(first, end)
        if self._check_routes is not None:
            self._check_routes.note(first, end)

    def _repair_all(self, first: int, end: int, *, eagerly: bool = False) -> int:
        """Wait for a segment's headers and repair it until they are clean; its flagged layers."""
        layer, n_flagged = self._first_flagged(first, end), 0
        while layer >= 0:
            n_flagged += 1
            if not self._fetch(layer, end):
                self._wait()
            self._expect(layer, end)
            self._launches.again(layer, end, eagerly=eagerly)
            again = self._first_flagged(layer, end)
            if again == layer:
                raise ShardError(f"layer {layer}: a pick is absent after it was fetched")
            layer = again
        return n_flagged

    def _fetch(self, layer: int, end: int) -> bool:
        """Fetch what a layer misses; what later ones up to `end` miss follows as hints.

        Returns whether a request was sent: the device has ended what it did then.
        """
        absent = self._headers.absent(layer)
        self.counters.misses += 1
        if self._log is not None:
            where = f"position {self.sequence.position} layer {layer}, segment to {end - 1}"
            self._log(f"miss: {where}: experts {', '.join(map(str, absent))}")
        # The daemon should know what is in use before it evicts.
        self._experts.report(acknowledges=False)
        with self._on_host("fetch"):
            picks = self._headers.picks(layer)
            return self._experts.fetch(layer, picks, lambda: self._rest(layer, end))

    def _rest(self, layer: int, end: int) -> list[tuple[int, int]]:
        """What the layers behind `layer` miss as they ran: they will run again with other inputs.

        Asked once a request has left; that they end is waited for beside it.
        """
        self._wait()
        later = range(layer + 1, end)
        return [(at, expert) for at in later for expert in self._headers.absent(at)][:_MOST_HINTS]

    def _first_flagged(self, first: int, end: int) -> int:
        """Wait for the headers of layers first to end - 1; the first with an absent pick, or -1.

        Where nothing is to follow, the device is idle then.
        """
        if self._step.ahead is not None:
            self._step.ahead.read(first, end)
        if end == self._config.n_layers:
            self._next_id.launch()
        with nullcontext() if self._timer is None else self._timer.waiting():
            found = self._headers.first_flagged(first, end, self._has_ended)
            if (found < 0 and end == self._config.n_layers) or self._is_watched:
                self._wait()
        if self._check_routes is not None:
            self._check_routes.check(self.sequence.position, first, end)
        if self._foresight is not None:
            # By the input of the last layer that has a true one: a flagged layer's is true.
            self._foresight.tell(found if found >= 0 else end - 1, end)
        return found

    @property
    def _is_watched(self) -> bool:
        """Whether somebody looks at each segment once it has ended."""
        watchers = (self._step.ahead, self._tracer, self._timer, self._check_routes)
        return self.mode == "oracle" or any(watcher is not None for watcher in watchers)

    def _has_ended(self) -> bool:
        """Whether the device has done all that was launched."""
        if self._model.device.type == "cuda":
            return bool(torch.cuda.current_stream().query())
        return True

    def _wait(self) -> None:
        """The only wait for the device in a step without misses."""
        if self._model.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _on_host(self, part: str) -> AbstractContextManager[None]:
        return nullcontext() if self._timer is None else self._timer.on_host(part)

    def _compare(self, first: int, end: int) -> None:
        """Run the segment once more eagerly; raise ShardError where a bit differs."""
        replayed, n_missed = self._step.snapshot(first, end), self._experts.io.misses
        self._settle(first, end)
        self._launches.at_once(first, end)
        self._repair_all(first, end, eagerly=True)  # a later miss took an earlier one's slot
        self._n_missed += self._experts.io.misses - n_missed  # none of the token's own
        found = self._step.first_difference(replayed, self._step.snapshot(first, end))
        if found:
            raise ShardError(
                f"position {self.sequence.position}: graph and eager launches differ: {found}"
            )

    def _check(self, token: int) -> None:
        sequence = self.sequence
        if sequence.position >= sequence.context:
            raise ConfigError(f"the context of {sequence.context} tokens is full")
        if not 0 <= token < self._config.vocab_size:
            raise ConfigError(
                f"token id {token} at position {sequence.position}: the vocabulary has "
                f"{self._config.vocab_size} ids"
            )
