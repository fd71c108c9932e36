"""Made-up routing traces, so that caches can be sized before the first real trace exists.

What is known of real ones: adjacent tokens share 39 % of their experts (LIMITS). The kinds differ
in what lies behind that: how uneven popularity is and how it moves. Every token keeps some picks of
the token before it, as many as hold the share at its target; the others are drawn without
replacement by the kind's weights (an exponential race: the k smallest of Exp(1) / weight). Pure,
and the same for the same seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .routing_trace import RoutingTrace, TraceShape, from_tokens

SHARED = 0.39
FLASH = TraceShape(40, 384, 6, expert_bytes=18_800_640, slot_bytes=18_800_640)

Weights = NDArray[np.float64]  # [n_layers, n_experts], above 0

_GAIN = 0.02  # how fast the share of kept picks follows what is seen
_SMOOTH = 0.9


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a kind of trace is made of."""

    about: str
    exponent: float = 0.0  # of the Zipf law over a layer's experts; 0: all alike
    n_topics: int = 1  # each with its own favourites
    topic_tokens: int = 0  # how long a topic lasts on average; 0: for ever
    common: float = 0.0  # share of the weights that all topics have in common
    drift_tokens: int = 0  # in which one topic turns into another; 0: no drift
    recency: float = 0.0  # share of the weights that goes to what was picked lately
    recent_tokens: int = 1  # how far back that reaches, on average


RECIPES = {
    "flat": Recipe("every expert is as likely"),
    "skewed": Recipe("few experts take most picks (Zipf)", exponent=1.0),
    "topics": Recipe(
        "favourites change at once, every 400 tokens or so, among 8 topics",
        exponent=1.0,
        n_topics=8,
        topic_tokens=400,
        common=0.4,
    ),
    "drift": Recipe(
        "favourites turn slowly into others, within 1,000 tokens",
        exponent=1.0,
        n_topics=1000,
        common=0.4,
        drift_tokens=1000,
    ),
    "recent": Recipe(
        "most picks are among those of the last 100 tokens",
        exponent=0.6,
        recency=0.9,
        recent_tokens=100,
    ),
}


class _Mood:
    """The weights of the next token."""

    def __init__(self, recipe: Recipe, shape: TraceShape, dice: np.random.Generator) -> None:
        self._recipe = recipe
        self._dice = dice
        self._n_layers, self._n_experts = shape.n_layers, shape.n_experts
        self._zipf = np.arange(1, shape.n_experts + 1, dtype=np.float64) ** -recipe.exponent
        self._zipf /= self._zipf.sum()
        self._common = self._favourites()
        self._topics: dict[int, Weights] = {}
        self._topic = self._next_topic = 0
        self._age = 0
        self._lately = np.zeros((shape.n_layers, shape.n_experts))

    def weights(self) -> Weights:
        """What the next token draws by."""
        recipe = self._recipe
        weights = self._of_topic(self._topic)
        if recipe.drift_tokens:
            part = self._age / recipe.drift_tokens
            weights = (1 - part) * weights + part * self._of_topic(self._topic + 1)
        if recipe.recency:
            total = self._lately.sum(axis=1, keepdims=True)
            seen = np.divide(self._lately, total, out=weights.copy(), where=total > 0)
            weights = (1 - recipe.recency) * weights + recipe.recency * seen
        return weights

    def move_on(self, picks: NDArray[np.int64]) -> None:
        """One token later; `picks` [n_layers, top_k] are what it picked."""
        recipe = self._recipe
        self._age += 1
        if recipe.drift_tokens and self._age == recipe.drift_tokens:
            self._topics.pop(self._topic, None)
            self._topic, self._age = self._topic + 1, 0
        if recipe.topic_tokens and self._dice.random() < 1 / recipe.topic_tokens:
            self._topic = int(self._dice.integers(recipe.n_topics))
        if recipe.recency:
            self._lately *= 1 - 1 / recipe.recent_tokens
            np.put_along_axis(
                self._lately, picks, np.take_along_axis(self._lately, picks, 1) + 1.0, 1
            )

    def _of_topic(self, topic: int) -> Weights:
        if topic not in self._topics:
            common = self._recipe.common
            self._topics[topic] = common * self._common + (1 - common) * self._favourites()
        return self._topics[topic]

    def _favourites(self) -> Weights:
        """The Zipf weights in another order for every layer."""
        rows = np.tile(self._zipf, (self._n_layers, 1))
        return self._dice.permuted(rows, axis=1)


def synthetic_trace(
    kind: str, n_tokens: int, *, shape: TraceShape = FLASH, seed: int = 0, shared: float = SHARED
) -> RoutingTrace:
    """Return a trace of `n_tokens` tokens of one of RECIPES.

    shared  share of a token's picks that the token before it picked too; as near as the kind allows
    """
    dice = np.random.default_rng(seed)
    mood = _Mood(RECIPES[kind], shape, dice)
    rows = np.arange(shape.n_layers)[:, None]
    experts = np.empty((n_tokens, shape.n_layers, shape.top_k), np.int64)
    kept, seen = shared, shared
    was_picked = np.zeros((shape.n_layers, shape.n_experts), np.bool_)
    for token in range(n_tokens):
        race = dice.standard_exponential(was_picked.shape) / mood.weights()
        if token:
            race[(dice.random(was_picked.shape) < kept) & was_picked] = -1.0
        picks = np.argpartition(race, shape.top_k - 1, axis=1)[:, : shape.top_k]
        if token:
            now = float(was_picked[rows, picks].mean())
            seen = _SMOOTH * seen + (1 - _SMOOTH) * now
            kept = min(1.0, max(0.0, kept + _GAIN * (shared - seen)))
        was_picked.fill(False)
        was_picked[rows, picks] = True
        experts[token] = picks
        mood.move_on(picks)
    return from_tokens(shape, experts)
