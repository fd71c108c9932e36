"""Whether every way to decode gives the same bits: modes, device cache sizes, orders of reads.

Each case decodes the same prompt greedily from an empty sequence. The first one, eager and without
a device cache, is what the others are held to: every id, and the bytes of every layer's streams.
They are looked at when a token has ended, so that it goes as one does that nobody looks at. Used by
`headrace verify --runtime` and by tests.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from compute.experts.device_experts import DeviceExperts
from compute.model.model import Model
from compute.model.sequence import Sequence as ModelSequence
from protocol.errors import ShardError

from .hashes import segment_hashes
from .runner import Runner
from .step_buffers import StepBuffers

MODES = ("eager", "layer", "segment")
ORACLE_TOKENS = 8
LEAST_TOKENS = 2  # of a case that has little time

OpenExperts = Callable[[int], AbstractContextManager[DeviceExperts]]  # of so many device slots
Shuffle = Callable[[int | None], None]  # lets reads end in the order of a seed, None: as they do


@dataclass(frozen=True, slots=True)
class Case:
    """One way to decode."""

    mode: str
    n_device: int  # slots of the device cache
    is_shuffled: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a case gave."""

    case: Case
    n_tokens: int
    ids: str  # hash of the new ids
    streams: str  # hash of the streams after the last layer at each position
    n_misses: int
    n_replays: int
    seconds: float
    difference: str  # where it left the first case, "" where it did not


@dataclass(slots=True)
class Decoded:
    """Ids and hashes of one case."""

    ids: list[int] = field(default_factory=list)
    hashes: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)

    def token(self, position: int, n_layers: int, buffers: StepBuffers) -> None:
        """Note the hashes of each layer of a token that has ended."""
        for layer in range(n_layers):
            self.hashes[position, layer] = segment_hashes(layer + 1, buffers)

    def streams_hash(self, last_layer: int) -> str:
        """Return one hash of the streams after the last layer."""
        ends = [own for (_, layer), own in sorted(self.hashes.items()) if layer == last_layer]
        return _digest(repr(ends))

    def difference(self, wanted: Decoded) -> str:
        """Return the first place that differs from another case's, "" where none does."""
        for (position, layer), own in sorted(self.hashes.items()):
            other = wanted.hashes.get((position, layer))
            pairs = zip(("streams", "hidden"), own, other or own, strict=True)
            for name, left, right in reversed(list(pairs)):  # hidden are the earlier ones
                if left != right:
                    return f"position {position} layer {layer}: {name} {left}, wanted {right}"
        for place, (left_id, right_id) in enumerate(zip(self.ids, wanted.ids, strict=False)):
            if left_id != right_id:
                return f"new token {place}: id {left_id}, wanted {right_id}"
        return ""


def sizes_of(n_keys: int, top_k: int, most: int) -> list[int]:
    """Return device cache sizes: none, a layer's picks, half and all of the keys that may be."""
    every = min(n_keys, most)
    return sorted({0, min(top_k, every), every // 2, every})


def run_matrix(
    model: Model,
    open_experts: OpenExperts,
    *,
    sizes: Sequence[int],
    n_tokens: int,
    prompt: Sequence[int],
    shuffle: Shuffle | None = None,
    modes: Sequence[str] = MODES,
    seconds: float = math.inf,
    tell: Callable[[Outcome], None] = lambda _outcome: None,
) -> list[Outcome]:
    """Return the outcome of every case, each told as it comes; the first is the reference.

    sizes    of the device cache, in slots; the smallest comes first
    shuffle  None where reads end as they like
    seconds  after which the first case, the slowest, ends; the others take as many tokens

    Raises as the experts do.
    """
    wanted: Decoded | None = None
    outcomes: list[Outcome] = []
    for n_device in sorted(sizes):
        with open_experts(n_device) as experts:
            for is_shuffled in (False, True) if shuffle is not None else (False,):
                for mode in (*modes, "oracle"):
                    case = Case(mode, n_device, is_shuffled)
                    if mode == "oracle" and is_shuffled:
                        continue
                    if shuffle is not None:
                        shuffle(len(outcomes) if is_shuffled else None)
                    n = min(n_tokens, ORACLE_TOKENS) if mode == "oracle" else n_tokens
                    end = time.perf_counter() + (seconds if wanted is None else math.inf)
                    decoded, outcome = _run(model, experts, case, prompt, n, wanted, end)
                    if wanted is None:
                        wanted, n_tokens = decoded, max(1, len(decoded.ids))
                    outcomes.append(outcome)
                    tell(outcome)
    return outcomes


def _run(
    model: Model,
    experts: DeviceExperts,
    case: Case,
    prompt: Sequence[int],
    n_tokens: int,
    wanted: Decoded | None,
    end: float,
) -> tuple[Decoded, Outcome]:
    """Decode `n_tokens` in one way; at least LEAST_TOKENS of them, and no more after `end`."""
    began, n_misses, decoded = time.perf_counter(), experts.io.misses, Decoded()
    context = len(prompt) + n_tokens
    sequence = ModelSequence(model.config, context, model.device, model.precision)
    runner = Runner(model, sequence, experts, mode=case.mode)
    difference = ""

    def take_in(token: int) -> None:
        runner.step(token)
        decoded.token(sequence.position - 1, model.config.n_layers, runner.buffers)

    try:
        for token in prompt:
            take_in(token)
        while len(decoded.ids) < n_tokens and (
            len(decoded.ids) < LEAST_TOKENS or time.perf_counter() < end
        ):
            decoded.ids.append(runner.likeliest())
            take_in(decoded.ids[-1])
    except ShardError as error:  # the oracle's own comparison is one of these
        difference = str(error)
    runner.finish()
    if wanted is not None:
        difference = difference or decoded.difference(wanted)
    outcome = Outcome(
        case,
        len(decoded.ids),
        _digest(repr(decoded.ids)),
        decoded.streams_hash(model.config.n_layers - 1),
        experts.io.misses - n_misses,
        runner.counters.replays,
        time.perf_counter() - began,
        difference,
    )
    return decoded, outcome


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
