"""What a chunk of the released sizes launches on a GPU, counted without one.

    python tests/support/chunk_launches.py

prints a JSON object a layer: its kernels by name, torch's operators but for those that only look at
memory another way, those among the latter, and what made the host wait for the device. Tensors pose
as a GPU's (`offline_gpu.py`), so this wants a process of its own.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.chunk_slots import AlikeRows
from bench.whole_step import config_of, model_of, pieces_of
from compute.experts.arena_view import PieceShapes
from compute.experts.arena_view import pieces_of as cut
from compute.model.precision import Precision
from compute.model.sequence import Sequence as ModelSequence
from compute.model.sources import ExpertMatrices, Resident
from tests.support import offline_gpu

CHUNK = 2048
N_LAYERS = 25  # every kind of layer is among them
# Operators that launch nothing, or nothing where the dtype is the wanted one already.
FREE = frozenset((
    "alias", "as_strided", "chunk", "contiguous", "detach", "detach_", "empty", "empty_like",
    "expand", "flatten", "lift_fresh", "narrow", "new_empty", "permute", "reshape", "resize_",
    "resolve_conj", "resolve_neg", "select", "slice", "split", "split_with_sizes", "squeeze",
    "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as_complex", "view_as_real",
    "_unsafe_view",
))  # fmt: skip
WAITS = frozenset({"item", "_local_scalar_dense", "nonzero", "tolist", "is_nonzero"})


class Counted(TorchDispatchMode):
    """Counts the operators that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: Counter[str] = Counter()
        self.free: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.split("::")[1]
        found: Any = 0
        if name == "copy_" and args[1].is_meta and not args[0].is_meta:
            found = args[0].fill_(CHUNK * 6 // args[0].numel())  # all experts are picked alike
        elif name not in {"item", "_local_scalar_dense"}:
            found = func(*args, **(kwargs or {}))
        if name in WAITS:
            self.waits[name] += 1
        elif name in FREE or (name in {"to", "_to_copy"} and found.dtype == args[0].dtype):
            self.free[name] += 1
        else:
            self.launched[name] += 1
        return found


class Slots(AlikeRows):
    """Experts that all lie in one slot of the device."""

    def __init__(self, pieces: PieceShapes, slot_bytes: int, row_bytes: int) -> None:
        super().__init__(row_bytes, 56)
        self._slot = torch.empty(slot_bytes, dtype=torch.uint8, device="cuda")
        self._pieces = pieces

    def stream(self, _layer: int, experts: Sequence[int]) -> Iterator[tuple[int, ExpertMatrices]]:
        """Yield views of the slot."""
        for expert in experts:
            yield expert, cut(self._slot, self._pieces)

    def resident(self, _layer: int, experts: Sequence[int]) -> Resident:
        """Say that all of them are there."""
        starts = np.full(len(experts), 4096)
        return Resident(starts, self._pieces.offsets, self._pieces.shapes)


_WAITS_FOR_EVENTS: Counter[str] = Counter()


class Posed:
    """An event."""

    def record(self) -> None:
        """Nothing runs."""

    def synchronize(self) -> None:
        """The host would wait here."""
        _WAITS_FOR_EVENTS["event"] += 1


def layers() -> Iterator[dict[str, Any]]:
    """Yield what each layer of a second chunk launches."""
    config = config_of(N_LAYERS)
    with offline_gpu.recorded() as kernels, torch.inference_mode():
        pieces, slot_bytes = pieces_of(config)
        model = model_of(config)
        slots = Slots(pieces, slot_bytes, config.engram_row_bytes)
        sequence = ModelSequence(config, 2 * CHUNK, torch.device("cuda"), Precision.HIGHWAY)
        for turns in (model.plain_turns, model.yarn_turns):
            turns.table(2 * CHUNK)
        for _ in range(2):
            step = model.begin(sequence, [1] * CHUNK, slots, slots)
            step.positions, step.window_places  # noqa: B018  made once for all layers
            streams, pre = model.embedded([1] * CHUNK)
            found = []
            for layer, block in enumerate(model.blocks):
                kernels.clear()
                _WAITS_FOR_EVENTS.clear()
                with Counted() as counted:
                    streams, pre = block(step, streams, pre)
                found.append(
                    {
                        "layer": layer,
                        "kernels": Counter(one.name.split(".")[-1] for one in kernels),
                        "torch": counted.launched,
                        "free": counted.free.total(),
                        "waits": dict(counted.waits + _WAITS_FOR_EVENTS),
                    }
                )
            sequence.position = step.end
    yield from found


def main() -> None:
    """Print them."""
    with (
        mock.patch.object(Tensor, "data_ptr", return_value=4096),
        mock.patch.object(torch.cuda, "Event", Posed),
    ):
        for layer in layers():
            sys.stdout.write(json.dumps(layer) + "\n")


if __name__ == "__main__":
    main()
