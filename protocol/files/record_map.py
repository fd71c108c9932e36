"""The slice map of an expert pack: every expert is one record, or its stripes on several drives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .model_config import ModelConfig
from .pack_format import Hashes, PackHeader
from .safetensors_header import Shard
from .slice_map import RECORD, ExpertLayout, Slice, SliceMap


@dataclass(frozen=True, slots=True)
class RecordFile:
    """One pack file, opened and checked; no descriptor stays open."""

    shard: Shard
    header: PackHeader
    checksums: Hashes  # [n_experts], of whole slots
    parts: Hashes  # [n_experts, n_parts]


class RecordMap(SliceMap):
    """Key to the records' places; `checksums` are those of the slots once they are filled."""

    def __init__(
        self,
        config: ModelConfig,
        layouts: tuple[ExpertLayout, ...],
        stripes: Sequence[Sequence[RecordFile]],  # [layer][stripe]; empty for a missing layer
        mirrors: Sequence[RecordFile | None],  # [layer]
    ) -> None:
        files = [file for layer in stripes for file in layer]
        copies = [file for file in mirrors if file is not None]
        super().__init__(
            config,
            layouts,
            tuple(file.shard for file in [*files, *copies]),
            np.zeros((0, 0, 0), np.int32),
            np.zeros((0, 0, 0), np.int64),
        )
        self._stripes = tuple(tuple(layer) for layer in stripes)
        self._mirrors = tuple(mirrors)
        self.checksums: NDArray[np.uint64] = np.zeros((config.n_layers, config.n_experts), "<u8")
        for layer, parts in enumerate(self._stripes):
            if parts:
                self.checksums[layer] = parts[0].checksums
        self.checksums.flags.writeable = False

    def slices(self, layer: int, expert: int) -> tuple[Slice, ...]:
        """Return an expert's record, as one slice or as its units on several drives.

        Raises ValueError on a layer or expert that the model, or this share of it, does not have.
        """
        self._check_key(layer, expert)
        if not self._stripes[layer]:
            raise ValueError(f"layer {layer} expert {expert}: not in this share of the pack")
        return tuple(part for file in self._stripes[layer] for part in _slices(file, expert))

    def n_copies(self, layer: int) -> int:
        """Return how often a layer's experts are there: 0 in a share without, 2 with a mirror."""
        self._check_key(layer, 0)
        return bool(self._stripes[layer]) + (self._mirrors[layer] is not None)

    def mirror_slices(self, layer: int, expert: int) -> tuple[Slice, ...]:
        """Return the same record in the mirror, () where there is none."""
        self._check_key(layer, expert)
        mirror = self._mirrors[layer]
        return () if mirror is None else tuple(_slices(mirror, expert))


def _slices(file: RecordFile, expert: int) -> list[Slice]:
    header = file.header
    start = header.record_offset(expert)
    return [
        Slice(file.shard, start + offset, n_bytes, "U8", (n_bytes,), slot_offset, RECORD)
        for slot_offset, offset, n_bytes in header.stripe.spans(header.layout.image.slot_bytes)
    ]
