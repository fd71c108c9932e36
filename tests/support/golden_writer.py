"""Golden files of our own making, with chosen roundings turned: to test the golden tool itself."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from compute.frontend.token_map import load_token_map
from compute.model.model import Model
from compute.model.precision import Precision
from compute.model.record import Record
from compute.model.weights import load_weights
from protocol.files.checkpoint import open_checkpoint
from tests.support.local_sources import LocalSources
from tests.support.near_ties import Event, NearTies, Noted


class GoldenWriter:
    """Runs a folder's checkpoint over token ids in one pass and writes what golden files hold."""

    def __init__(self, directory: Path, ids: list[int]) -> None:
        checkpoint = open_checkpoint(directory)
        self.directory = directory
        self.ids = ids
        self._source = LocalSources(checkpoint)
        self._config = checkpoint.config
        self._weights = load_weights(checkpoint, torch.device("cpu"))
        self._token_map = load_token_map(directory, checkpoint.config)

    def write(self) -> None:
        """Write token ids and both oracles, nothing turned."""
        ids = torch.tensor([self.ids])
        save_file({"input_ids": ids}, self.directory / "tokens.safetensors")
        self.write_noround()
        self.write_round(frozenset())

    def write_noround(self) -> None:
        """Write golden_noround."""
        model = self._model(Precision.UNROUNDED)
        record = Record(full=True)
        logits = model.forward(
            model.new_sequence(len(self.ids)),
            self.ids,
            self._source,
            self._source,
            logits="all",
            record=record,
        )
        self._save("golden_noround_fp32", logits, record)

    def write_round(self, flips: frozenset[Event]) -> tuple[Tensor, list[Noted]]:
        """Write golden_round with these roundings turned; return logits and what was near a tie."""
        ties = NearTies()
        model = self._model(Precision.WIDE, ties)
        record = Record(full=True)
        ties.begin(flips)
        with torch.inference_mode():
            sequence = model.new_sequence(len(self.ids))
            step = model.begin(sequence, self.ids, self._source, self._source, record)
            streams, pre = model.embedded(self.ids)
            for layer, block in enumerate(model.blocks):
                ties.layer = layer
                streams, pre = block(step, streams, pre)
            logits = model.head(streams, pre)
        self._save("golden_round_fp32", logits, record)
        return logits, ties.noted

    def _model(self, precision: Precision, ties: NearTies | None = None) -> Model:
        numerics = ties.numerics() if ties else None
        return Model(self._config, self._weights, self._token_map, precision, numerics=numerics)

    def _save(self, name: str, logits: Tensor, record: Record) -> None:
        rows = [torch.from_numpy(rows) for rows in record.engram_rows]
        tensors = {
            "logits": logits,
            "h_out": torch.stack(record.streams),
            "pre_out": torch.stack(record.pre),
            "engram_rows": torch.stack(rows, 1).int() if rows else torch.empty(0),
        }
        for layer, (picks, weights) in enumerate(zip(record.picks, record.weights, strict=True)):
            tensors |= {f"router.{layer}.ids": picks.int(), f"router.{layer}.weights": weights}
        tensors |= {f"select.{layer}": rows.int() for layer, rows in record.selections.items()}
        contiguous = {key: tensor.clone().contiguous() for key, tensor in tensors.items()}
        save_file(contiguous, self.directory / f"{name}.safetensors")
