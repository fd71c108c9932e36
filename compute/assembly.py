"""The engine from its parts: where its experts lie and how its tokens are launched."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from protocol.errors import ConfigError
from protocol.files.checkpoint import Checkpoint
from protocol.wire.client import ExpertClient

from .config import ComputeConfig
from .experts.miss_client import MissClient, Waiting
from .load import expert_shapes, find_context
from .model.model import Model
from .model.sequence import Sequence
from .prefix.cache import PrefixCache
from .session import Engine

if TYPE_CHECKING:
    from .experts.device_experts import DeviceExperts
    from .graph.guess_writer import GuessWriter

_LOG = logging.getLogger("headrace.compute")
_KEPT_FREE = 3 << 30  # bytes of device memory for chunks, graphs and the libraries' own use


def make_engine(
    checkpoint: Checkpoint,
    config: ComputeConfig,
    model: Model,
    client: ExpertClient,
    waiting: Waiting,
    prefixes: PrefixCache | None = None,
) -> Engine:
    """Return the engine for a connected client. Raises ConfigError."""
    context, mode = find_context(checkpoint, config), find_mode(checkpoint, config, model)
    if mode == "plain":
        _refuse_without_launches(config)
        source = MissClient(client, expert_shapes(checkpoint), waiting, model.device)
        return Engine(model, source, context=context, chunk=config.chunk, prefixes=prefixes)
    # Triton takes long to import, and torch's operators do without it.
    from .graph.decoding import Decoding, GraphSettings  # noqa: PLC0415

    settings = GraphSettings(
        mode,
        config.segments,
        side_streams=config.side_streams == "on",
        log=_to_stderr if config.graph_log else None,
        trace=_to_stderr if config.trace_hash else None,
        timings=_to_stderr if config.timings else None,
        checks=config.check_routes,
        lookahead=config.lookahead,
        guesses=_guess_writer(checkpoint, config.predict_trace),
    )
    n_device = find_device_slots(checkpoint, config, model, context)
    experts = make_experts(checkpoint, client, waiting, n_device, model.device)
    decoding = Decoding(model, experts, context, settings)
    return Engine(
        model, experts, context=context, chunk=config.chunk, prefixes=prefixes, decoding=decoding
    )


def make_experts(
    checkpoint: Checkpoint,
    client: ExpertClient,
    waiting: Waiting,
    n_device: int,
    device: torch.device,
) -> DeviceExperts:
    """Return experts for launches, so many of them on the device. Raises ConfigError."""
    from .experts.device_experts import DeviceExperts  # noqa: PLC0415  as above
    from .experts.tiers import ExpertTiers  # noqa: PLC0415

    shapes = expert_shapes(checkpoint)
    places = ExpertTiers(
        shapes,
        [layout.formats for layout in checkpoint.slice_map.layouts],
        checkpoint.config.n_experts,
        _slot_bytes(checkpoint),
        n_device,
        device,
    )
    return DeviceExperts(client, shapes, places, waiting)


def find_device_slots(
    checkpoint: Checkpoint, config: ComputeConfig, model: Model, context: int
) -> int:
    """Return the device cache's slots; a sequence of so many tokens is yet to be made beside it."""
    state = Sequence.bytes_of(model.config, context, model.precision)
    fit = find_device_cache(config, model.device, state) // _slot_bytes(checkpoint)
    return min(fit, checkpoint.config.n_keys)


def _slot_bytes(checkpoint: Checkpoint) -> int:
    return max(layout.image.slot_bytes for layout in checkpoint.slice_map.layouts)


def find_mode(checkpoint: Checkpoint, config: ComputeConfig, model: Model) -> str:
    """Return how tokens are launched: "plain" for torch's operators, else a mode of the runner.

    Raises ConfigError where a mode was asked for that the model cannot have.
    """
    asked = config.graph
    if asked == "plain" or (asked == "auto" and model.device.type != "cuda"):
        return "plain"
    from .experts.tiers import expert_shape  # noqa: PLC0415  as above
    from .graph.decode_step import supports  # noqa: PLC0415  as above

    reason = supports(model)
    try:
        layouts = checkpoint.slice_map.layouts
        for pieces, layout in zip(expert_shapes(checkpoint), layouts, strict=True):
            expert_shape(pieces, layout.formats)
    except ConfigError as error:
        reason = str(error)
    if config.vendor_decode_defect:
        reason = "the vendor's decode defect is reproduced"
    if not reason:
        return "segment" if asked == "auto" else asked
    if asked != "auto":
        raise ConfigError(f"--graph {asked}: {reason}")
    _LOG.warning("tokens go by torch's operators, slowly: %s", reason)
    return "plain"


def _refuse_without_launches(config: ComputeConfig) -> None:
    """Raise ConfigError for settings that torch's operators cannot honour."""
    for flag, given in (
        ("--check-routes", config.check_routes),
        ("--device-cache", config.device_cache),
        ("--graph-log", config.graph_log),
        ("--lookahead", config.lookahead),
        ("--predict-trace", config.predict_trace),
        ("--side-streams", config.side_streams == "off"),
        ("--timings", config.timings),
        ("--trace-hash", config.trace_hash),
    ):
        if given:
            raise ConfigError(
                f"{flag}: tokens go by torch's operators here; "
                "wanted --graph eager, layer, segment or oracle, and a model that they take"
            )


def _guess_writer(checkpoint: Checkpoint, path: Path | None) -> GuessWriter | None:
    if path is None:
        return None
    from protocol.files.guess_format import GuessShape  # noqa: PLC0415  as above

    from .graph.guess_writer import GuessWriter  # noqa: PLC0415

    own = checkpoint.config
    shape = GuessShape(own.n_layers, own.n_experts, own.top_k, checkpoint.fingerprint)
    return GuessWriter(path, shape)


def find_device_cache(config: ComputeConfig, device: torch.device, n_taken: int) -> int:
    """Return the device cache's bytes: what was said, else what a discrete GPU has left.

    n_taken  bytes that will be taken of what is free
    """
    if config.device_cache is not None:
        return config.device_cache
    if device.type != "cuda" or torch.cuda.get_device_properties(device).is_integrated:
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, free - n_taken - _KEPT_FREE)


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
