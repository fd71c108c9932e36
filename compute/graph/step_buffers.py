"""What one token's step writes on its way from the embedding to the logits.

Every layer has its own streams and pre-mix, before its attention and before its experts: nothing
that a layer read is overwritten within the step. So a layer may run again, from its experts on,
without anything having been saved for it. Owned by one DecodeStep; used on its CUDA stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compute.host_draw import DrawNumbers
from compute.model.precision import Numerics
from protocol.files.model_config import ModelConfig

FIRST_REACH = 1024


@dataclass(frozen=True, slots=True)
class RouteRecord:
    """What the routers of all layers read and left, kept for the check of them."""

    logits: Tensor  # [n_layers, 1, E] f32
    pointers: Tensor  # [n_layers, 3, K] i64
    weights: Tensor  # [n_layers, K] f32

    @classmethod
    def new(cls, config: ModelConfig, device: torch.device) -> RouteRecord:
        """Return one for a model."""
        n, top_k = config.n_layers, config.top_k
        return cls(
            torch.zeros((n, 1, config.n_experts), dtype=torch.float32, device=device),
            torch.zeros((n, 3, top_k), dtype=torch.int64, device=device),
            torch.zeros((n, top_k), dtype=torch.float32, device=device),
        )


class StepBuffers:
    """Tensors of one token, most of them on the device; a leading 1 is the token."""

    def __init__(self, config: ModelConfig, numerics: Numerics, device: torch.device) -> None:
        n_layers, n_streams, hidden = config.n_layers, config.hc_mult, config.hidden_size

        def f32(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        def streams(n: int) -> Tensor:
            shape = (n, 1, n_streams, hidden)
            return torch.zeros(shape, dtype=numerics.stream, device=device)

        # The token's id and its position.
        self.inputs = torch.zeros(2, dtype=torch.int64, device=device)
        self.staged_inputs = torch.zeros(  # the same in the host's memory, before they are brought
            2, dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        self.streams = streams(
            n_layers + 1
        )  # before a layer, after its Engram; the last is the end
        self.pre = f32(n_layers + 1, 1, n_streams)  # of the sublayer before it
        self.pre[0, :, 0] = 1
        self.middle = streams(n_layers)  # before a layer's experts
        self.middle_pre = f32(n_layers, 1, n_streams)
        self._engram_layers = config.engram_layers
        self.before_engram = streams(len(config.engram_layers))
        self.post, self.comb = f32(1, n_streams), f32(1, n_streams, n_streams)
        self.row = f32(1, hidden)  # what a sublayer reads
        self.rounded = f32(1, hidden)  # the same, rounded to fp8
        # In the host's memory: the routing kernels write there.
        self.headers = torch.zeros(
            (n_layers, 1 + 3 * config.top_k),
            dtype=torch.int32,
            pin_memory=device.type == "cuda",
        )
        self.pointers = torch.zeros((3, config.top_k), dtype=torch.int64, device=device)
        self.weights = f32(config.top_k)
        self.routes: RouteRecord | None = None  # made by who checks them
        self.selections = {
            source: torch.full((1, config.index_top_k), -1, dtype=torch.int32, device=device)
            for source in config.index_source_layers
        }
        self.reach = FIRST_REACH  # positions below it may be launched
        self.kept: Tensor | None = None  # candidate blocks [1, blocks] u8, made by who knows them
        self.logits = f32(1, config.vocab_size)
        self.likeliest = torch.zeros(2, dtype=torch.int64, device=device)
        # What the next id is drawn with, and the id; at their ends in the host's memory.
        n_numbers, is_pinned = len(DrawNumbers._fields), device.type == "cuda"
        self.draw_numbers = torch.zeros(n_numbers, dtype=torch.int64, device=device)
        self.staged_numbers = torch.zeros(n_numbers, dtype=torch.int64, pin_memory=is_pinned)
        self.drawn = torch.zeros(2, dtype=torch.int64, pin_memory=is_pinned)

    def before_engram_of(self, layer: int) -> Tensor:
        """Return the streams [1, S, H] that the layer before hands on, before any Engram."""
        if layer in self._engram_layers:
            return self.before_engram[self._engram_layers.index(layer)]
        return self.streams[layer]

    @property
    def token(self) -> Tensor:
        """The token's id [1]."""
        return self.inputs[:1]

    @property
    def first(self) -> Tensor:
        """The token's position [1]."""
        return self.inputs[1:]
