"""The model from a checkpoint, ready to run at what the settings say."""

from __future__ import annotations

import logging

import torch

from protocol.errors import ConfigError
from protocol.files.checkpoint import Checkpoint
from protocol.files.slice_map import ExpertLayout
from protocol.sizes import format_size

from .config import DEFAULT_CONTEXT, ComputeConfig
from .device import reach_device
from .device_name import AUTO_DEVICE
from .experts.arena_view import PieceShapes
from .frontend.token_map import token_map_of
from .model.model import Model
from .model.precision import Precision
from .model.weights import load_weights

_LOG = logging.getLogger("headrace.compute")
_SMALL_LAYER_BYTES = 16 << 20  # dense weights of one layer, as stored
_GPU_SHARE = 0.9  # of a GPU's memory that dense weights may fill where it is chosen by itself


def load_model(checkpoint: Checkpoint, config: ComputeConfig) -> Model:
    """Read the dense weights to the device and return the model; raises ConfigError, ShardError."""
    torch.set_num_threads(config.threads or find_threads(checkpoint))
    for note in (*checkpoint.warnings, *checkpoint.notes()):
        _LOG.info("%s", note)
    device = find_device(config.device, checkpoint)
    return Model(
        checkpoint.config,
        load_weights(checkpoint, device),
        token_map_of(checkpoint),
        Precision(config.precision),
        device,
        vendor_decode_defect=config.vendor_decode_defect,
    )


def find_threads(checkpoint: Checkpoint) -> int:
    """Return the CPU threads that suit the model's products.

    Small ones gain nothing from a second thread, and where the cores have other work, the daemon's
    reads among it, threads that wait for each other cost far more than they bring.
    """
    per_layer = _dense_bytes(checkpoint) // checkpoint.config.n_layers
    return 1 if per_layer < _SMALL_LAYER_BYTES else torch.get_num_threads()


def _dense_bytes(checkpoint: Checkpoint) -> int:
    return sum(tensor.n_bytes for tensor in checkpoint.dense_tensors())


def find_device(name: str, checkpoint: Checkpoint) -> torch.device:
    """Return the device; auto: the first GPU where torch finds one that has room for the model.

    Raises ConfigError where torch does not know the device or cannot reach it.
    """
    if name == AUTO_DEVICE:
        name = "cuda" if _gpu_has_room(checkpoint) else "cpu"
    return reach_device(name)


def _gpu_has_room(checkpoint: Checkpoint) -> bool:
    """Whether the first GPU holds the dense weights; a line says so where one does not."""
    if not torch.cuda.is_available():
        return False
    gpu, n_bytes = torch.cuda.get_device_properties(0), _dense_bytes(checkpoint)
    if n_bytes <= _GPU_SHARE * gpu.total_memory:
        return True
    memory, wanted = format_size(gpu.total_memory), format_size(n_bytes)
    _LOG.warning("the CPU computes: %s has %s, the dense weights are %s", gpu.name, memory, wanted)
    return False


def expert_shapes(checkpoint: Checkpoint) -> tuple[PieceShapes, ...]:
    """Return the pieces' places and shapes, one entry a layer; equal layers share it."""
    layouts = checkpoint.slice_map.layouts
    shapes = {layout: _piece_shapes(layout) for layout in set(layouts)}
    return tuple(shapes[layout] for layout in layouts)


def _piece_shapes(layout: ExpertLayout) -> PieceShapes:
    image = layout.image
    pieces = zip(layout.pieces, image.piece_bytes, strict=True)
    return PieceShapes(
        image.piece_offsets,
        tuple((piece.shape[0], n // piece.shape[0]) if n else (0, 0) for piece, n in pieces),
    )


def find_context(checkpoint: Checkpoint, config: ComputeConfig) -> int:
    """Return the most tokens of a sequence; raises ConfigError above the model's limit."""
    limit = checkpoint.config.max_positions
    if config.context is None:
        return min(DEFAULT_CONTEXT, limit)
    if config.context > limit:
        raise ConfigError(f"--context is {config.context} tokens, the model takes at most {limit}")
    return config.context
