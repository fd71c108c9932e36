"""The demo with its experts in an arena within the process, and runners on it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from compute.experts.device_experts import DeviceExperts
from compute.experts.registered_arena import Registrar
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
_OPEN: list[DeviceExperts] = []


def close_rigs() -> None:
    """Unregister the arenas of all rigs; nothing may be running."""
    while _OPEN:
        _OPEN.pop().close()


@cache
def demo() -> Checkpoint:
    """Return the demo."""
    return open_checkpoint(resolve_model("demo"))


_MODELS: dict[tuple[object, ...], Model] = {}


def model_of(checkpoint: Checkpoint, device: str, precision: str = "highway") -> Model:
    """Return a checkpoint's model."""
    key = (checkpoint.directory, device, precision)
    if key not in _MODELS:
        _MODELS[key] = fresh_model(checkpoint, device, precision)
    return _MODELS[key]


def fresh_model(checkpoint: Checkpoint, device: str, precision: str = "highway") -> Model:
    """Return a checkpoint's model, loaded anew."""
    at = torch.device(device)
    torch.set_num_threads(1)  # as find_threads says of a model this small
    weights = load_weights(checkpoint, at)
    return Model(checkpoint.config, weights, token_map_of(checkpoint), Precision(precision), at)


def demo_model(device: str, precision: str = "highway") -> Model:
    """Return the demo's model."""
    return model_of(demo(), device, precision)


@dataclass
class Rig:
    """A runner, its daemon and its experts."""

    model: Model
    daemon: ArenaDaemon
    experts: DeviceExperts
    runner: Runner

    def prefill(self, ids: list[int], *, at_once: bool = False) -> None:
        """Take a prompt in by the model's own forward, one token at a time or all of it."""
        for chunk in [ids] if at_once else [[token] for token in ids]:
            self.experts.begin_step()
            self.model.forward(self.runner.sequence, chunk, self.experts, self.experts)
            self.experts.end_step()

    def greedy(self, n: int, token: int = 42) -> list[int]:
        """Take in `token` and the likeliest ids after it; return the n ids found."""
        ids = []
        for _ in range(n):
            self.runner.step(token)
            token = self.runner.likeliest()
            ids.append(token)
        return ids

    def state(self) -> list[np.ndarray]:
        """Return the bytes of the sequence's state and of what the last step left."""
        sequence, step = self.runner.sequence, self.runner._step
        tensors = [*sequence.windows, *sequence.rows.values(), *sequence.keys.values()]
        tensors += [part for g in sequence.open_groups.values() for part in (g.kv, g.scores)]
        tensors += [step.buffers.streams[-1], step.buffers.pre[-1], step.buffers.logits]
        return [tensor.contiguous().view(torch.uint8).cpu().numpy().copy() for tensor in tensors]


def make_experts(
    daemon: ArenaDaemon,
    checkpoint: Checkpoint,
    n_device: int,
    device: torch.device,
    registrar: Registrar | None = None,
) -> DeviceExperts:
    """Return experts with so many slots on the device."""
    layouts, shapes = checkpoint.slice_map.layouts, expert_shapes(checkpoint)
    places = ExpertTiers(
        shapes,
        [layout.formats for layout in layouts],
        checkpoint.config.n_experts,
        layouts[0].image.slot_bytes,
        n_device,
        device,
    )
    experts = DeviceExperts(daemon, shapes, places, registrar=registrar)  # type: ignore[arg-type]
    _OPEN.append(experts)
    return experts


def make_rig(
    device: str = "cpu",
    *,
    checkpoint: Checkpoint | None = None,
    context: int = CONTEXT,
    n_slots: int = 256,
    n_device: int = 0,
    precision: str = "highway",
    registrar: Registrar | None = None,
    **settings: Any,
) -> Rig:
    """Return a rig: slots of the arena and of the device cache; the rest is the runner's own."""
    checkpoint = checkpoint or demo()
    model = model_of(checkpoint, device, precision)
    daemon = ArenaDaemon(checkpoint, min(n_slots, checkpoint.config.n_keys))
    experts = make_experts(daemon, checkpoint, n_device, model.device, registrar)
    sequence = Sequence(model.config, context, model.device, model.precision)
    return Rig(model, daemon, experts, Runner(model, sequence, experts, **settings))


@dataclass(frozen=True)
class Wanted:
    """Ids that the demo finds, and the bytes it leaves."""

    ids: list[int]
    state: list[np.ndarray]


@cache
def wanted(device: str, prompt: tuple[int, ...], n: int, token: int = 42) -> Wanted:
    """Return what n greedy steps after a prompt give by single launches; found once a process."""
    made = make_rig(device, mode="eager")
    made.prefill(list(prompt))
    return Wanted(made.greedy(n, token), made.state())


def beside(rig: Rig, **settings: Any) -> Rig:
    """Return a runner of a second sequence on a rig's experts."""
    context = rig.runner.sequence.context
    sequence = Sequence(rig.model.config, context, rig.model.device, rig.model.precision)
    runner = Runner(rig.model, sequence, rig.experts, **settings)
    return Rig(rig.model, rig.daemon, rig.experts, runner)
