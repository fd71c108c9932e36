"""Module by module with golden inputs: is a jump a rounding tie, or is a module wrong?

Every layer gets the golden streams and pre-mix of the layer before, one position after the other.
Where a layer's output is beyond the tolerance, roundings of values near a midpoint are turned the
other way until it is within: single ones first, then more. A layer that no such turn brings back is
wrong. Turned roundings stay turned for the layers and positions that read what they wrote.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compute.model.model import Model
from compute.model.record import Record
from compute.model.sequence import Sequence as ModelSequence
from tests.support.golden_files import Golden
from tests.support.golden_sources import Sources
from tests.support.near_ties import STORED, Event, NearTies, Noted

TOLERANCE = 1e-3
CLEAN = 3e-5  # what single precision alone leaves of one layer: beyond it, a tie is looked for
MOST_TURNS = 6
MOST_PAIRS = 12
MOST_EARLIER = 48

Flips = frozenset[Event]


@dataclass(slots=True)
class Found:
    """The verdict: `wrong` is empty when every difference is a tie."""

    ties: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    largest: float = 0.0  # of any module, ties turned


@dataclass(slots=True)
class _Run:
    errors: list[
        float
    ]  # a layer: largest difference of streams and pre-mix, inf for other integers
    noted: list[Noted]


class TieSearch:
    """Runs positions 0 .. last with golden inputs and explains what differs."""

    def __init__(self, model: Model, ties: NearTies, golden: Golden, sources: Sources) -> None:
        """Take a model whose numerics are those of `ties`."""
        self.model = model
        self.ties = ties
        self.golden = golden
        self.sources = sources
        self.before: list[ModelSequence] = []  # the state before each position
        self.flips: list[Flips] = []
        self.noted: list[list[Noted]] = []

    def explain(self, last: int) -> Found:
        """Check positions up to `last`."""
        found = Found()
        sequence = self.model.new_sequence(len(self.golden.ids))
        for position in range(last + 1):
            self.before.append(copy.deepcopy(sequence))
            self.flips.append(frozenset())
            run = self._step(sequence, position)
            self.noted.append(run.noted)
            if max(run.errors) > CLEAN:
                run = self._mend(position, run, found)
                sequence = self._state_after(position)
            found.largest = max(found.largest, *run.errors)
        return found

    def _mend(self, position: int, run: _Run, found: Found) -> _Run:
        for layer in range(len(run.errors)):
            if run.errors[layer] <= CLEAN:
                continue
            turned = self._turn(position, layer, run) or self._turn_earlier(position, layer, run)
            if turned is not None:
                place, noted, run = turned
                for where, what in zip(place, noted, strict=True):
                    found.ties.append(_told(where, layer, what))
            if run.errors[layer] > TOLERANCE:
                found.wrong.append(
                    f"position {position} layer {layer}: differs by {run.errors[layer]:.2g}, "
                    "and no value near a midpoint explains it"
                )
                return run
        return run

    def _turn(
        self, position: int, layer: int, run: _Run
    ) -> tuple[list[int], list[Noted], _Run] | None:
        """Turn values of this position; None where that does not bring the layer back."""
        chosen: list[Noted] = []
        flips, best = self.flips[position], run
        for _ in range(MOST_TURNS):
            candidates = [n for n in best.noted if n.event.layer == layer]
            candidates = [n for n in candidates if n.event not in flips]
            options = [(self._tried(position, flips | {n.event}), [n]) for n in candidates]
            trial = min(options, key=lambda o: o[0].errors[layer], default=None)
            if trial is None or trial[0].errors[layer] > best.errors[layer] / 2:
                trial = self._best_pair(position, layer, flips, candidates)
            if trial is None or trial[0].errors[layer] >= best.errors[layer]:
                return None
            best, turned = trial
            chosen += turned
            flips |= {n.event for n in turned}
            if best.errors[layer] <= CLEAN:
                self.flips[position] = flips
                self.noted[position] = best.noted
                return [position] * len(chosen), chosen, best
        return None

    def _best_pair(
        self, position: int, layer: int, flips: Flips, candidates: Sequence[Noted]
    ) -> tuple[_Run, list[Noted]] | None:
        few = candidates[:MOST_PAIRS]
        pairs = [[a, b] for i, a in enumerate(few) for b in few[i + 1 :]]
        options = [(self._tried(position, flips | {n.event for n in p}), p) for p in pairs]
        return min(options, key=lambda o: o[0].errors[layer], default=None)

    def _turn_earlier(
        self, position: int, layer: int, run: _Run
    ) -> tuple[list[int], list[Noted], _Run] | None:
        """Turn one row stored by an earlier position, whose effect shows only now."""
        layers = {layer, self.model.config.kv_source(layer)}
        rows = [
            (earlier, noted)
            for earlier in reversed(range(position))
            for noted in self.noted[earlier]
            if noted.event.kind in STORED and noted.event.layer in layers
        ]
        for earlier, noted in rows[:MOST_EARLIER]:
            if noted.event in self.flips[earlier]:
                continue
            kept, states = self.flips[earlier], self.before[:]
            self.flips[earlier] = kept | {noted.event}
            trials = self._replay(earlier, position)
            ends_well = trials[-1].errors[layer] <= CLEAN
            if ends_well and all(max(t.errors) <= TOLERANCE for t in trials[:-1]):
                return [earlier], [noted], trials[-1]
            self.flips[earlier], self.before = kept, states
        return None

    def _tried(self, position: int, flips: Flips) -> _Run:
        kept, self.flips[position] = self.flips[position], flips
        run = self._step(copy.deepcopy(self.before[position]), position)
        self.flips[position] = kept
        return run

    def _state_after(self, position: int) -> ModelSequence:
        sequence = copy.deepcopy(self.before[position])
        self._step(sequence, position)
        return sequence

    def _replay(self, first: int, last: int) -> list[_Run]:
        """Run positions first .. last again and keep the states before them."""
        sequence, runs = copy.deepcopy(self.before[first]), []
        for position in range(first, last + 1):
            self.before[position] = copy.deepcopy(sequence)
            runs.append(self._step(sequence, position))
        return runs

    @torch.inference_mode()
    def _step(self, sequence: ModelSequence, position: int) -> _Run:
        """Run one position, each layer on the golden output of the one before."""
        golden, record = self.golden, Record(full=True)
        ids = [golden.ids[position]]
        here = slice(position, position + 1)
        self.ties.begin(self.flips[position])
        streams, pre = self.model.embedded(ids)
        errors = []
        with self.sources.step() as source:
            step = self.model.begin(sequence, ids, source, source, record)
            for layer, block in enumerate(self.model.blocks):
                self.ties.layer = layer
                out, next_pre = block(step, streams, pre)
                streams, pre = golden.streams[layer][here], golden.pre[layer][here]
                same = _same_integers(record, golden, layer, position)
                error = _largest([(out, streams), (next_pre, pre)])
                errors.append(error if same else float("inf"))
            sequence.position = step.end
        return _Run(errors, self.ties.noted)


def _same_integers(record: Record, golden: Golden, layer: int, position: int) -> bool:
    picks = torch.equal(record.picks[layer][0], golden.picks[layer][position])
    if layer not in golden.selections:
        return picks
    return picks and torch.equal(record.selections[layer][0], golden.selections[layer][position])


def _largest(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    return max(float((a - b).abs().amax().nan_to_num(nan=float("inf"))) for a, b in pairs)


def _told(position: int, layer: int, noted: Noted) -> str:
    return (
        f"position {position} layer {layer}: {noted.event.kind} value {noted.value:.7g}, "
        f"midpoint {noted.midpoint:.7g}"
    )
