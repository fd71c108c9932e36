"""The model: token ids in, logits out, one chunk of one sequence at a time.

Owns the layers and their dense weights; routed experts and Engram rows come through the sources.
Invariants: a chunk of any length gives what single tokens give; results depend on the sequence and
the ids alone, not on how the sources work. Source: model specification, sections 3 and 4.
"""

from __future__ import annotations

import collections.abc
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.errors import ConfigError
from protocol.files.model_config import ModelConfig

from .block import Block
from .chunk_check import ChunkCheck
from .engram_hash import EngramHash
from .head import Head
from .precision import Numerics, Precision
from .record import Record
from .rotary import RotaryTable, plain_frequencies, yarn_frequencies
from .sequence import Sequence
from .sources import ExpertSource, RowSource
from .step import Step
from .weights import ModelWeights

TokenIds = collections.abc.Sequence[int]


class Model:
    """One model at one precision on one device.

    token_map             [vocab_size] int64, of compute.frontend.token_map
    vendor_decode_defect  score index queries against the keys that were published last, as the
                          vendor's decode does on open groups; only for comparisons with it
    numerics              roundings other than the precision's; only for the golden tool
    launches              whether chunks go by kernels; None: on a GPU
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        token_map: NDArray[np.int64],
        precision: Precision = Precision.HIGHWAY,
        device: torch.device | None = None,
        *,
        vendor_decode_defect: bool = False,
        numerics: Numerics | None = None,
        launches: bool | None = None,
    ) -> None:
        self.config = config
        self.precision = precision
        self.device = device or torch.device("cpu")
        self.numerics = numerics or Numerics.of(precision)
        self.hash = EngramHash(config, token_map)
        self.embed = weights.embed
        self.plain_turns = RotaryTable(plain_frequencies(config), self.device)
        self.yarn_turns = RotaryTable(yarn_frequencies(config), self.device)
        self.blocks = [
            Block(
                config,
                layer,
                layer_weights,
                self.numerics,
                self.yarn_turns if config.ratio(layer) else self.plain_turns,
                vendor_decode_defect=vendor_decode_defect,
                launches=self.device.type == "cuda" if launches is None else launches,
            )
            for layer, layer_weights in enumerate(weights.layers)
        ]
        self.head = Head(weights.norm, weights.head, config.norm_eps, self.numerics)
        self.checks: ChunkCheck | None = None  # holds each layer's routing to the host's
        self.gemv_tokens = 0  # most of a chunk whose routed experts go token by token, to compare

    def new_sequence(self, context: int) -> Sequence:
        """Return an empty sequence for at most `context` tokens."""
        return Sequence(self.config, context, self.device, self.precision)

    @torch.inference_mode()
    def forward(
        self,
        sequence: Sequence,
        token_ids: TokenIds,
        experts: ExpertSource,
        rows: RowSource,
        *,
        logits: Literal["last", "all"] = "last",
        record: Record | None = None,
    ) -> Tensor:
        """Take the tokens into the sequence and return logits [1 or T, vocab] f32.

        Raises ConfigError on an id outside the vocabulary and on more tokens than the context
        holds, before anything changes; what the sources raise leaves the sequence unusable.
        """
        step = self.begin(sequence, token_ids, experts, rows, record)
        streams, pre = self.embedded(token_ids)
        for block in self.blocks:
            streams, pre = block(step, streams, pre)
        sequence.position = step.end
        if logits == "last":
            streams, pre = streams[-1:], pre[-1:]
        return self.head(streams, pre)

    def begin(
        self,
        sequence: Sequence,
        token_ids: TokenIds,
        experts: ExpertSource,
        rows: RowSource,
        record: Record | None = None,
    ) -> Step:
        """Check the ids, ask for the Engram rows of the chunk and return its step."""
        self._check(sequence, token_ids)
        n_tokens = len(token_ids)
        step = Step(sequence, n_tokens, experts, rows, record, self.checks, self.gemv_tokens)
        compressed = self.hash.compress(np.array(token_ids, np.int64))
        ids = np.concatenate([sequence.last_ids, compressed])
        tables = range(len(self.config.engram_layers))
        numbers = [self.hash.rows(table, ids) for table in tables]
        wanted = [(table, numbers[table].reshape(-1)) for table in tables]
        step.engram_handles += rows.request_all(wanted)
        if record is not None and record.full:
            record.engram_rows += numbers
        sequence.last_ids = ids[len(token_ids) :]
        return step

    def embedded(self, token_ids: TokenIds) -> tuple[Tensor, Tensor]:
        """Return the streams before layer 0 [T, S, H], all alike, and their pre-mix (1, 0, ...)."""
        ids = torch.tensor(token_ids, device=self.device)
        n_streams = self.config.hc_mult
        rows = self.embed.index_select(0, ids).to(self.numerics.stream)
        pre = torch.zeros(len(token_ids), n_streams, device=self.device)
        pre[:, 0] = 1
        return rows.unsqueeze(1).expand(-1, n_streams, -1), pre

    def _check(self, sequence: Sequence, token_ids: TokenIds) -> None:
        if not token_ids:
            raise ConfigError("no token ids to take in")
        if sequence.position + len(token_ids) > sequence.context:
            raise ConfigError(
                f"{sequence.position} + {len(token_ids)} tokens are more than the context of "
                f"{sequence.context}"
            )
        for number, token in enumerate(token_ids):
            if not 0 <= token < self.config.vocab_size:
                raise ConfigError(
                    f"token id {token} at position {sequence.position + number}: the vocabulary "
                    f"has {self.config.vocab_size} ids"
                )
