"""Chooses the next id: a pure function of (seed, position, logits).

Invariants: the same three give the same id on any machine and device and in any order of calls;
among equal logits the lower id comes first; nothing is kept between calls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ConfigError, ShardError

from .host_draw import DrawNumbers, draw
from .id_weights import ONE, Float32s

Ids = NDArray[np.int64]

_COLDEST = 2.0**-64  # no temperature but 0 is below: differences of logits over it stay normal


@dataclass(frozen=True, slots=True)
class Sampling:
    """How ids are chosen. Filters act in this order: temperature, top_k, top_p, min_p."""

    temperature: float = 1.0  # 0: greedy, the other three are then without effect
    top_p: float = 1.0  # keep the likeliest ids until their sum reaches this; 1: all
    top_k: int = 0  # keep at most so many ids; 0: all
    min_p: float = 0.0  # drop ids below this share of the likeliest one's probability
    seed: int = 0  # 0 .. 2**64 - 1
    top_logprobs: int = 0  # likeliest ids to report beside the chosen one

    def __post_init__(self) -> None:
        ranges = (
            ("temperature", self.temperature, 0, 100),
            ("top_p", self.top_p, 1e-9, 1),
            ("top_k", self.top_k, 0, 2**31),
            ("min_p", self.min_p, 0, 1),
            ("seed", self.seed, 0, 2**64 - 1),
            ("top_logprobs", self.top_logprobs, 0, 100),
        )
        for name, value, least, most in ranges:
            if not least <= value <= most:
                raise ConfigError(f"{name} is {value}, wanted {least} to {most}")


@dataclass(frozen=True, slots=True)
class Choice:
    """One chosen id, with log-probabilities of the model's own distribution where asked."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # (id, log-probability), likeliest first


def choose(
    logits: Float32s,
    position: int,
    sampling: Sampling,
    *,
    ruled: Float32s | None = None,
    logprobs: bool = False,
) -> Choice:
    """Return the id at `position` (the number of ids before it).

    logits     [vocab] f32
    ruled      the logits after penalties and grammar, which the draw is from; None: the plain ones
    logprobs   also report the natural logarithm of the softmax of the plain logits: no
               temperature, no filter

    Raises ShardError when a logit is NaN: only damaged weights lead there.
    """
    best = int(logits.argmax())  # the first of equals; NaN counts as the largest
    if np.isnan(logits[best]):
        raise ShardError(f"position {position}: the logit of id {best} is NaN; check the weights")
    drawn = logits if ruled is None else ruled
    if sampling.temperature == 0:
        chosen = int(drawn.argmax())
    else:
        chosen = draw(drawn, draw_numbers(sampling, position))
    if not logprobs:
        return Choice(chosen)
    wide = logits.astype(np.float64)
    wide -= wide[best]
    wide -= np.log(np.exp(wide).sum())
    top = _descending(logits, sampling.top_logprobs) if sampling.top_logprobs else ()
    return Choice(chosen, float(wide[chosen]), tuple((int(k), float(wide[k])) for k in top))


def draw_numbers(sampling: Sampling, position: int) -> DrawNumbers:
    """Return what the id at `position` is drawn with; the temperature is not 0."""
    temperature = np.float32(max(sampling.temperature, _COLDEST))
    return DrawNumbers(
        temperature=int(temperature.view(np.uint32)),
        top_k=sampling.top_k,
        # Both products only move the point of a float: they are exact.
        share=int(sampling.top_p * 2.0**64) if sampling.top_p < 1 else 0,
        least=max(1, math.ceil(sampling.min_p * ONE)),
        word=_random_word(sampling.seed, position),
    )


def _descending(logits: Float32s, n: int) -> Ids:
    """Ids of the `n` largest logits, largest first, the lower id first among equals."""
    if n >= len(logits):
        return np.argsort(-logits, kind="stable")
    least = np.partition(logits, len(logits) - n)[len(logits) - n]
    ids = np.flatnonzero(logits >= least)
    return ids[np.argsort(-logits[ids], kind="stable")][:n]


def _random_word(seed: int, position: int) -> int:
    """64 bits that belong to (seed, position): Philox with the position as counter."""
    return int(np.random.Philox(key=seed, counter=position << 64).random_raw())
