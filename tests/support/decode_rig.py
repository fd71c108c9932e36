"""The demo with its experts in an arena within the process, and runners on it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from compute.experts.device_experts import DeviceExperts
from compute.experts.tiers import ExpertTiers
from compute.frontend.token_map import token_map_of
from compute.graph.runner import Runner
from compute.load import expert_shapes
from compute.model.model import Model
from compute.model.precision import Precision
from compute.model.sequence import Sequence
from compute.model.weights import load_weights
from protocol.files.checkpoint import Checkpoint, open_checkpoint, resolve_model

from .arena_daemon import ArenaDaemon

CONTEXT = 512


@cache
def demo() -> Checkpoint:
    """Return the demo."""
    return open_checkpoint(resolve_model("demo"))


@cache
def demo_model(device: str, precision: str = "highway") -> Model:
    """Return the demo's model."""
    at = torch.device(device)
    torch.set_num_threads(1)  # as find_threads says of a model this small
    weights = load_weights(demo(), at)
    return Model(demo().config, weights, token_map_of(demo()), Precision(precision), at)


@dataclass
class Rig:
    """A runner, its daemon and its experts."""

    model: Model
    daemon: ArenaDaemon
    experts: DeviceExperts
    runner: Runner

    def prefill(self, ids: list[int]) -> None:
        """Take a prompt in by the model's own forward, one token at a time."""
        for token in ids:
            self.experts.begin_step()
            self.model.forward(self.runner.sequence, [token], self.experts, self.experts)
            self.experts.end_step()

    def state(self) -> list[np.ndarray]:
        """Return the bytes of the sequence's state and of what the last step left."""
        sequence, step = self.runner.sequence, self.runner._step
        tensors = [*sequence.windows, *sequence.rows.values(), *sequence.keys.values()]
        tensors += [part for g in sequence.open_groups.values() for part in (g.kv, g.scores)]
        tensors += [step.buffers.streams[-1], step.buffers.pre[-1], step.buffers.logits]
        return [tensor.contiguous().view(torch.uint8).cpu().numpy().copy() for tensor in tensors]


def make_rig(
    device: str = "cpu",
    *,
    n_slots: int = 256,
    n_device: int = 0,
    precision: str = "highway",
    **settings: Any,
) -> Rig:
    """Return a rig: slots of the arena and of the device cache; the rest is the runner's own."""
    model, config = demo_model(device, precision), demo().config
    daemon = ArenaDaemon(demo(), n_slots)
    layouts = demo().slice_map.layouts
    shapes = expert_shapes(demo())
    places = ExpertTiers(
        shapes,
        [layout.formats for layout in layouts],
        config.n_experts,
        layouts[0].image.slot_bytes,
        n_device,
        model.device,
    )
    experts = DeviceExperts(daemon, shapes, places)  # type: ignore[arg-type]
    sequence = Sequence(config, CONTEXT, model.device, model.precision)
    return Rig(model, daemon, experts, Runner(model, sequence, experts, **settings))
