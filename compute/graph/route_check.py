"""The device's routing held to the host's: the same logits through the chain of references.

Only where it was asked for: every launch is followed by a copy of what its routers read and left.
Invariants: what is compared was launched with the table and addresses that were noted before it:
until it has ended, copies may have come to the device and a daemon may have been lost.
"""

from __future__ import annotations

import torch

from compute.experts.tiers import ExpertTiers
from compute.model.model import Model
from kernels.reference.compare_routes import compare_routes
from kernels.reference.route_m1 import route_m1
from protocol.errors import ShardError

from .recording import GraphCounters
from .step_buffers import RouteRecord, StepBuffers


class RouteCheck:
    """`check` compares layers that have run; `counters` say how many were compared."""

    def __init__(
        self, model: Model, buffers: StepBuffers, tiers: ExpertTiers, counters: GraphCounters
    ) -> None:
        config = self._config = model.config
        self._headers = buffers.headers
        self._record = buffers.routes = RouteRecord.new(config, model.device)
        self._tiers = tiers
        self._counters = counters
        self._table = torch.from_numpy(tiers.host_table.copy())
        self._addresses = [torch.zeros(0, dtype=torch.int64)] * config.n_layers
        self._bias = [block.weights.moe.bias.cpu() for block in model.blocks]

    def note(self, first: int, end: int) -> None:
        """The layers first to end - 1 are launched next."""
        tiers = self._tiers
        self._table[first:end] = torch.from_numpy(tiers.host_table[first:end])
        # Never written to: another arena's are another array.
        addresses = torch.from_numpy(tiers.host_addresses)
        self._addresses[first:end] = [addresses] * (end - first)

    def check(self, position: int, first: int, end: int) -> None:
        """Compare the layers first to end - 1, which have ended. Raises ShardError."""
        kept, config = self._record, self._config
        logits, pointers, weights, headers = (
            tensor[first:end].cpu()
            for tensor in (kept.logits, kept.pointers, kept.weights, self._headers)
        )
        for layer in range(first, end):
            at = layer - first
            header, wanted, _ = route_m1(
                logits[at],
                self._bias[layer],
                self._table[layer],
                self._addresses[layer],
                self._tiers.offsets[layer],
                top_k=config.top_k,
                routed_scale=config.routed_scale,
            )
            difference = compare_routes(
                layer, headers[at], header, pointers[at], wanted, weights[at]
            )
            if difference:
                raise ShardError(
                    f"position {position}: the device routes otherwise than the host: {difference}"
                )
            self._counters.routes_checked += 1
