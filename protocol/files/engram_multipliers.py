"""The odd multipliers of an Engram's hash, by the rule that the model was trained with.

Exact 64-bit integers: they exceed 2^53, and a wrong one gives plausible garbage without any error.
Source: model specification, section 3.2, Multipliers.
"""

from __future__ import annotations

import numpy as np

from .model_config import ModelConfig

_SEED = 10007


def engram_multipliers(config: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """Return the multipliers of each table, one for each look-back from 0."""
    return tuple(table_multipliers(config, layer) for layer in config.engram_layers)


def table_multipliers(config: ModelConfig, layer: int) -> tuple[int, ...]:
    """Return the multipliers of the table before `layer`."""
    bound = max(1, ((2**63 - 1) // config.engram_compressed_vocab) // 2)
    draws = np.random.default_rng(_SEED * layer).integers(
        0, bound, size=config.engram_max_ngram, dtype=np.int64
    )
    return tuple(2 * draw + 1 for draw in draws.tolist())
