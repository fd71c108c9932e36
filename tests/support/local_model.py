"""A checkpoint's model with its experts and rows read from the files: no daemon, any precision."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from compute.frontend.token_map import token_map_of
from compute.model.model import Model
from compute.model.precision import Precision
from compute.model.record import Record
from compute.model.sequence import Sequence as ModelSequence
from compute.model.weights import load_weights
from protocol.files.checkpoint import open_checkpoint
from tests.support.local_sources import LocalSources


class LocalModel:
    """Everything of one checkpoint but the precision."""

    def __init__(self, directory: Path) -> None:
        self.checkpoint = open_checkpoint(directory)
        self.config = self.checkpoint.config
        self.weights = load_weights(self.checkpoint, torch.device("cpu"))
        self.token_map = token_map_of(self.checkpoint)
        self.source = LocalSources(self.checkpoint)

    def at(
        self, precision: str, *, vendor_decode_defect: bool = False, launches: bool = False
    ) -> Model:
        """The model at a precision, its chunks by torch or by the launchers of kernels."""
        return Model(
            self.config,
            self.weights,
            self.token_map,
            Precision(precision),
            vendor_decode_defect=vendor_decode_defect,
            launches=launches,
        )

    def full(self, model: Model, ids: Sequence[int], record: Record | None = None) -> Tensor:
        """Logits of all positions in one pass."""
        return self.cut(model, ids, [len(ids)], record)

    def cut(
        self,
        model: Model,
        ids: Sequence[int],
        sizes: Sequence[int],
        record: Record | None = None,
        sequence: ModelSequence | None = None,
    ) -> Tensor:
        """Logits of all positions in passes of these sizes."""
        sequence = sequence or model.new_sequence(len(ids))
        logits, first = [], 0
        for size in sizes:
            part = ids[first : first + size]
            logits.append(
                model.forward(sequence, part, self.source, self.source, logits="all", record=record)
            )
            first += size
        return torch.cat(logits)
