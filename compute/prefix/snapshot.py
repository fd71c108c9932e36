"""The state of a sequence, taken apart and put together again.

A span is what a stretch of tokens appended: compressed rows and index keys; it stays true whatever
follows. A front is what only holds at one position: window rings, open groups, last ids. The spans
from 0 to a position and the front at it are the whole state there.
Source: model specification, section 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compute.model.precision import Precision
from compute.model.sequence import Sequence as ModelSequence

from .packed_rows import Form, PackedRows, pack, unpack


@dataclass(frozen=True, slots=True)
class Span:
    """What the tokens first .. end - 1 appended, by kv source."""

    first: int
    end: int
    rows: dict[int, PackedRows]
    keys: dict[int, PackedRows]

    @property
    def n_bytes(self) -> int:
        """Bytes of the rows and keys."""
        return sum(packed.n_bytes for packed in (*self.rows.values(), *self.keys.values()))


@dataclass(frozen=True, slots=True)
class Front:
    """What holds at one position only."""

    position: int
    windows: PackedRows  # of every layer, in the order of the slots
    open_groups: dict[int, tuple[Tensor, Tensor]]  # kv and scores of the tokens in it, f32
    last_ids: NDArray[np.int64]
    published_keys: int | None

    @property
    def n_bytes(self) -> int:
        """Bytes of the rings and open groups."""
        held = [tensor for pair in self.open_groups.values() for tensor in pair]
        return self.windows.n_bytes + sum(4 * tensor.numel() for tensor in held)


@torch.inference_mode()
def take_span(sequence: ModelSequence, first: int) -> Span:
    """Return what the tokens from `first` to the sequence's position appended."""
    rows, keys = {}, {}
    for layer in sequence.rows:
        ratio = sequence.config.ratio(layer)
        groups = slice(first // ratio, sequence.position // ratio)
        rows[layer] = pack(sequence.rows[layer][groups], _form(sequence, Form.LATENT))
        keys[layer] = pack(sequence.keys[layer][groups], _form(sequence, Form.INDEX))
    return Span(first, sequence.position, rows, keys)


@torch.inference_mode()
def take_front(sequence: ModelSequence) -> Front:
    """Return what holds at the sequence's position."""
    n_slots = min(sequence.position, sequence.config.sliding_window)
    windows = torch.cat([ring[:n_slots] for ring in sequence.windows])
    open_groups = {}
    for layer, group in sequence.open_groups.items():
        n_open = sequence.position % sequence.config.ratio(layer)
        kv, scores = (part[:n_open].to("cpu", copy=True) for part in (group.kv, group.scores))
        open_groups[layer] = (kv, scores)
    return Front(
        position=sequence.position,
        windows=pack(windows, _form(sequence, Form.FP8)),
        open_groups=open_groups,
        last_ids=sequence.last_ids.copy(),
        published_keys=sequence.published_keys,
    )


@torch.inference_mode()
def restore(sequence: ModelSequence, spans: Sequence[Span], front: Front) -> None:
    """Bring an empty sequence to the front's position; the spans reach from 0 to it."""
    assert sequence.position == 0
    for span in spans:
        for layer in sequence.rows:
            ratio = sequence.config.ratio(layer)
            groups = slice(span.first // ratio, span.end // ratio)
            sequence.rows[layer][groups] = unpack(span.rows[layer], sequence.device)
            sequence.keys[layer][groups] = unpack(span.keys[layer], sequence.device)
    n_layers = len(sequence.windows)
    rings = torch.unflatten(unpack(front.windows, sequence.device), 0, (n_layers, -1))
    for ring, kept in zip(sequence.windows, rings, strict=True):
        ring[: len(kept)] = kept
    for layer, (kv, scores) in front.open_groups.items():
        group = sequence.open_groups[layer]
        group.kv[: len(kv)] = kv.to(sequence.device)
        group.scores[: len(scores)] = scores.to(sequence.device)
    sequence.last_ids = front.last_ids.copy()
    sequence.published_keys = front.published_keys
    sequence.position = front.position


def _form(sequence: ModelSequence, rounded: Form) -> Form:
    return Form.RAW if sequence.precision is Precision.UNROUNDED else rounded
