"""What stands between the model's logits and the draw: biases, penalties, a grammar.

One object belongs to one request. Invariant: it depends on the committed ids alone, so a draw can
be repeated; nothing moves but by `commit`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from .grammar import Grammar


class LogitRules:
    """The rules of one request, over the ids committed so far.

    bias        added to the logit of an id
    frequency   taken off for each time that an id was committed
    presence    taken off once for every id that was committed
    grammar     forbids ids altogether
    """

    def __init__(
        self,
        *,
        bias: Mapping[int, float] | None = None,
        frequency: float = 0.0,
        presence: float = 0.0,
        grammar: Grammar | None = None,
    ) -> None:
        self._bias = dict(bias or {})
        self._frequency = frequency
        self._presence = presence
        self._grammar = grammar
        self._counts: Counter[int] = Counter()

    @property
    def ended(self) -> bool:
        """Whether the grammar allows no further id."""
        return self._grammar is not None and self._grammar.ended

    def applied(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the logits [vocab] f32 to draw from, a copy; -inf where an id may not come.

        Raises ConfigError where the grammar allows nothing.
        """
        ruled = logits.copy()
        for token_id, bias in self._bias.items():
            ruled[token_id] += bias
        if self._frequency or self._presence:
            for token_id, count in self._counts.items():
                ruled[token_id] -= self._frequency * count + self._presence
        if self._grammar is not None:
            self._grammar.forbid(ruled)
        return ruled

    def commit(self, token_id: int) -> None:
        """Take note of the id that was drawn. Raises ConfigError where the grammar forbids it."""
        self._counts[token_id] += 1
        if self._grammar is not None:
            self._grammar.commit(token_id)
