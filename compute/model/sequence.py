"""What one sequence carries from one forward pass to the next, and nothing else.

| state | owner | shape | slot |
| --- | --- | --- | --- |
| window rows | every layer | [window, k] | position mod window |
| compressed rows | kv sources | [context / ratio, k] | group |
| index keys | kv sources | [context / ratio, index k] | group |
| open group: kv, scores | kv sources of ratio 2 | [ratio, k] f32 | position mod ratio |
| last compressed ids | Engram | [n-gram - 1] | |
| position | sequence | | |

Invariants: whatever is written is addressed by its absolute position and depends on inputs alone.
A forward pass that raises leaves a sequence that cannot go on. Used by one thread.
Source: model specification, section 4.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.errors import ConfigError
from protocol.files.model_config import ModelConfig

from .engram_hash import DEAD
from .precision import Numerics, Precision


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """Tokens of a ratio-2 group that has not closed yet."""

    kv: Tensor  # [ratio, k] f32
    scores: Tensor  # [ratio, k] f32


class Sequence:
    """The state of one sequence of at most `context` tokens."""

    def __init__(
        self, config: ModelConfig, context: int, device: torch.device, precision: Precision
    ) -> None:
        if not 1 <= context <= config.max_positions:
            raise ConfigError(
                f"the context is {context} tokens, the model takes 1 to {config.max_positions}"
            )
        self.config = config
        self.context = context
        self.device = device
        self.precision = precision
        self.position = 0  # tokens taken in so far
        dtype = Numerics.of(precision).activation

        def zeros(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        self.windows = [
            zeros(config.sliding_window, config.head_dim) for _ in range(config.n_layers)
        ]
        self.rows: dict[int, Tensor] = {}
        self.keys: dict[int, Tensor] = {}
        self.open_groups: dict[int, OpenGroup] = {}
        for layer in config.kv_source_layers:
            ratio = config.ratio(layer)
            n_groups = -(-context // ratio)
            self.rows[layer] = zeros(n_groups, config.head_dim)
            self.keys[layer] = zeros(n_groups, config.index_head_dim)
            if ratio > 1:
                kv = zeros(ratio, config.head_dim, kind=torch.float32)
                self.open_groups[layer] = OpenGroup(kv, torch.full_like(kv, -torch.inf))
        self.last_ids: NDArray[np.int64] = np.full(config.engram_max_ngram - 1, DEAD, np.int64)
        # Only for the vendor's decode defect: the source whose keys were published last.
        self.published_keys: int | None = None

    @staticmethod
    def bytes_of(config: ModelConfig, context: int, precision: Precision) -> int:
        """Return the bytes of what grows with the context: compressed rows, keys, and the turns of
        positions, which are kept in two forms for either kind of layer.
        """
        size = torch.finfo(Numerics.of(precision).activation).bits // 8
        width = (config.head_dim + config.index_head_dim) * size
        groups = sum(-(-context // config.ratio(layer)) for layer in config.kv_source_layers)
        return groups * width + 4 * context * config.rope_head_dim * 4

    def reset(self) -> None:
        """Be empty again, in the same memory."""
        self.position = 0
        for tensor in (*self.windows, *self.rows.values(), *self.keys.values()):
            tensor.zero_()
        for group in self.open_groups.values():
            group.kv.zero_()
            group.scores.fill_(-torch.inf)
        self.last_ids = np.full_like(self.last_ids, DEAD)
        self.published_keys = None
