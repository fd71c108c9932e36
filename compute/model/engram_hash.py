"""Engram row numbers from token ids alone: compressed ids, n-gram hashes, primes.

All in int64 on the host, so rows can be asked for before the forward pass starts.
Source: model specification, section 3.2 (Token map, Multipliers, Buckets, Hash).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ConfigError
from protocol.files.config_rules import engram_column_rows
from protocol.files.engram_multipliers import engram_multipliers
from protocol.files.model_config import ModelConfig

DEAD = -1  # before the sequence: no compressed id
_HALF = 1 << 63


class EngramHash:
    """The hash of one model; `rows` is a function of compressed ids."""

    def __init__(self, config: ModelConfig, token_map: NDArray[np.int64]) -> None:
        if len(token_map) != config.vocab_size:
            raise ConfigError(
                f"the Engram token map has {len(token_map)} ids, vocab_size is {config.vocab_size}"
            )
        self.token_map = token_map
        self.history = config.engram_max_ngram - 1
        self._pad = int(token_map[config.engram_pad_id])
        self._multipliers = [np.array(row, np.int64) for row in engram_multipliers(config)]
        self._primes = [np.array(primes, np.int64) for primes in engram_column_rows(config)]
        self._offsets = [np.concatenate([[0], np.cumsum(p)[:-1]]) for p in self._primes]
        self._n_heads = config.engram_n_heads
        arrays = zip(self._multipliers, self._primes, self._offsets, strict=True)
        self._plain = [tuple(array.tolist() for array in table) for table in arrays]

    def compress(self, token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the compressed ids of token ids."""
        compressed: NDArray[np.int64] = self.token_map[token_ids]
        return compressed

    def rows(self, table: int, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Row numbers [T, columns] of the n-grams that end at each of the last T positions.

        ids  [history + T] compressed ids, DEAD before the sequence. A look-back that meets DEAD
        sees the pad id from there on. Column = (order - 2) * heads + head.
        """
        n_tokens = len(ids) - self.history
        if n_tokens == 1:
            return self._rows_of_one(table, ids.tolist())
        multiplier, primes = self._multipliers[table], self._primes[table]
        rows = np.empty((n_tokens, len(primes)), np.int64)
        blocked = np.zeros(n_tokens, np.bool_)
        mixed = np.zeros(n_tokens, np.int64)
        for back in range(self.history + 1):
            token = ids[self.history - back : self.history - back + n_tokens]
            blocked = blocked | (token == DEAD)
            mixed = mixed ^ (np.where(blocked, self._pad, token) * multiplier[back])
            if back:
                columns = slice((back - 1) * self._n_heads, back * self._n_heads)
                rows[:, columns] = mixed[:, None] % primes[columns]
        rows += self._offsets[table]
        return rows

    def _rows_of_one(self, table: int, ids: list[int]) -> NDArray[np.int64]:
        """`rows` of one token: plain numbers, since the device may be waiting."""
        multiplier, primes, offsets = self._plain[table]
        rows: list[int] = []
        is_blocked, mixed = False, 0
        for back in range(self.history + 1):
            token = ids[self.history - back]
            is_blocked = is_blocked or token == DEAD
            product = (self._pad if is_blocked else token) * multiplier[back]
            mixed ^= (product + _HALF) % (2 * _HALF) - _HALF  # as 64 bits hold it
            if back:
                columns = range((back - 1) * self._n_heads, back * self._n_heads)
                rows += [mixed % primes[column] + offsets[column] for column in columns]
        return np.array([rows], np.int64)
