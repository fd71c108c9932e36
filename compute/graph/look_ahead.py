"""What the routers of the next layers would make of a layer's input, beside the layer itself.

Guesses alone: nothing of a step reads them, so its bits are what they are without. A guess is
addressed by the layer whose input it was made from, and may be made again.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compute.model.model import Model
from kernels.route_m1 import route_rows
from kernels.router_logits import router_logits
from protocol.errors import ShardError


class LookAhead:
    """Launches `n_ahead` routers a layer, and the host's copy of what they picked."""

    def __init__(self, model: Model, row: Tensor, n_ahead: int) -> None:
        """`row` is where each layer's experts find their input."""
        config = self._config = model.config
        self.n_ahead = n_ahead
        self._row = row
        self._routers = [block.weights.moe for block in model.blocks]
        # Picks, ascending, and the bits of their weights.
        shape = (config.n_layers, n_ahead, 2, config.top_k)
        self._guesses = torch.full(shape, -1, dtype=torch.int32, device=model.device)
        self._host = torch.full(
            shape, -1, dtype=torch.int32, pin_memory=model.device.type == "cuda"
        )
        self._rows: NDArray[np.int32] = self._host.numpy()
        self._logits = torch.zeros(
            (n_ahead, 1, config.n_experts), dtype=torch.float32, device=model.device
        )

    def launch(self, layer: int) -> None:
        """Route the layer's input by the layers behind it, as far as there are any."""
        config = self._config
        for ahead in range(min(self.n_ahead, config.n_layers - 1 - layer)):
            moe, guess = self._routers[layer + 1 + ahead], self._guesses[layer, ahead]
            logits = router_logits(self._row, moe.router, out=self._logits[ahead])
            route_rows(
                logits,
                moe.bias,
                top_k=config.top_k,
                routed_scale=config.routed_scale,
                picks=guess[:1],
                weights=guess[1:].view(torch.float32),
            )

    def read(self, first: int, end: int) -> None:
        """Start copying what layers first to end - 1 guessed; it is there after a wait."""
        self._host[first:end].copy_(self._guesses[first:end], non_blocking=True)

    def guessed(self, layer: int, distance: int) -> list[int]:
        """Return what layer + distance would pick for the input of `layer`, best weight first.

        Raises ShardError where these are no picks.
        """
        picks, bits = self._rows[layer, distance - 1]
        if picks.min() < 0 or picks.max() >= self._config.n_experts:
            raise ShardError(
                f"layer {layer}: guessed {picks.tolist()} for layer {layer + distance}"
            )
        ranked: list[int] = picks[np.argsort(-bits.view(np.float32), kind="stable")].tolist()
        return ranked

    def all_guesses(self) -> NDArray[np.int32]:
        """Return guesses by the layer that they are for [n_layers, n_ahead, top_k], -1 for none."""
        found = np.full(self._rows[:, :, 0].shape, -1, np.int32)
        for ahead in range(min(self.n_ahead, len(found) - 1)):
            found[1 + ahead :, ahead] = self._rows[: -1 - ahead, ahead, 0]
        return found
