"""What `headrace inspect` says about a checkpoint, as plain values that JSON can hold."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from protocol.errors import ConfigError
from protocol.files.checkpoint import Checkpoint
from protocol.files.model_config import ModelConfig
from protocol.files.pack_directory import layer_ranges
from protocol.files.slice_map import FP4, PIECES, ExpertLayout
from protocol.files.tensor_table import dense_tensors

from .machine_memory import MachineMemory

if TYPE_CHECKING:
    from expert_daemon.arena import PlannedArena

HOST_SHARE = 0.9  # of the available memory; the rest is for activations and everything else
ARENA_SHARES = {"smallest": 0.0, "a quarter": 0.25, "half": 0.5, "all experts": 1.0}


def checkpoint_facts(checkpoint: Checkpoint, memory: MachineMemory) -> dict[str, Any]:
    """Return everything that `inspect` prints."""
    config, image = checkpoint.config, checkpoint.slice_map.image
    kinds = bytes_by_kind(checkpoint)
    return {
        "directory": str(checkpoint.path),
        "kind": checkpoint.kind,
        "model_type": "deepseek_v41",
        "fingerprint": checkpoint.fingerprint.hex(),
        "n_layers": config.n_layers,
        "n_experts": config.n_experts,
        "top_k": config.top_k,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "max_positions": config.max_positions,
        "n_parameters": n_parameters(checkpoint, in_tables=False),
        "n_engram_parameters": n_parameters(checkpoint, in_tables=True),
        "n_shards": len(checkpoint.shards),
        "n_tensors": len(checkpoint.tensors),
        "file_bytes": sum(shard.n_bytes for shard in checkpoint.shards),
        "bytes_by_kind": kinds,
        "expert": {
            "bytes": image.expert_bytes,
            "slot_bytes": image.slot_bytes,
            "pieces": dict(zip(PIECES, image.piece_bytes, strict=True)),
        },
        "formats": formats(checkpoint),
        "notes": [*checkpoint.warnings, *checkpoint.notes()],
        "token": {
            "expert_bytes": config.top_k
            * sum(layout.image.expert_bytes for layout in checkpoint.slice_map.layouts),
            "engram_bytes": sum(table.row_bytes for table in checkpoint.engram_tables)
            * config.engram_columns,
        },
        "engram_tables": [
            {
                "table": table.index,
                "layer": table.layer,
                "n_rows": table.n_rows,
                "row_bytes": table.row_bytes,
                "format": table.format,
                "scale_bytes": table.scales.n_bytes,
                "bytes": table.values.n_bytes + table.scales.n_bytes,
            }
            for table in checkpoint.engram_tables
        ],
        "layers": [layer_role(config, layer) for layer in range(config.n_layers)],
        "memory": asdict(memory),
        "dense_fits_on": dense_places(memory, kinds["dense"]),
        "packs": packs(checkpoint),
        "arenas": arenas(checkpoint, memory, kinds["dense"]),
    }


def bytes_by_kind(checkpoint: Checkpoint) -> dict[str, int]:
    """Return bytes of data of each kind, and of headers, indices and padding."""
    kinds: Counter[str] = Counter(dict.fromkeys(("expert", "engram", "dense", "skipped"), 0))
    for name, kind in checkpoint.tensor_kinds().items():
        kinds[kind] += checkpoint.tensors[name].n_bytes
    # A pack's experts are records, no tensors.
    kinds["expert"] = checkpoint.config.n_experts * sum(
        layout.image.expert_bytes * checkpoint.slice_map.n_copies(layer)
        for layer, layout in enumerate(checkpoint.slice_map.layouts)
    )
    data_bytes = sum(kinds.values())
    kinds["headers"] = sum(shard.n_bytes for shard in checkpoint.shards) - data_bytes
    return dict(kinds)


def n_parameters(checkpoint: Checkpoint, *, in_tables: bool) -> int:
    """Return the number of weights in the Engram tables, or outside them in the text model.

    Scales do not count.
    """
    config = checkpoint.config
    if in_tables:
        return config.engram_head_dim * sum(config.engram_n_rows)
    dense = dense_tensors(config).values()
    experts = config.n_keys * 3 * config.hidden_size * config.expert_width
    return experts + sum(math.prod(t.shape) for t in dense if t.dtype != "F8_E8M0")


def formats(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Return the experts' formats with the layers that have them."""
    layers: dict[ExpertLayout, list[int]] = {}
    for layer, layout in enumerate(checkpoint.slice_map.layouts):
        if checkpoint.slice_map.n_copies(layer):
            layers.setdefault(layout, []).append(layer)
    return [
        {
            "format": layout.format,
            "layers": layer_ranges(numbers),
            "expert_bytes": layout.image.expert_bytes,
            "slot_bytes": layout.image.slot_bytes,
        }
        for layout, numbers in layers.items()
    ]


def packs(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Return what `headrace pack` would give for each of its formats, or why it would not.

    The first row, of a source in other formats than fp4, is what it gives without `--experts`.
    """
    from .pack.plan import SOURCE_FORMATS, TARGETS, target_layout

    rows: list[dict[str, Any]] = []
    own = checkpoint.slice_map.layouts
    if any(layout.format != FP4 for layout in own):
        rows.append(
            {
                "experts": SOURCE_FORMATS,
                "format": ", ".join(dict.fromkeys(layout.format for layout in own)),
                "record_bytes": checkpoint.slice_map.image.slot_bytes,
                "bytes": checkpoint.config.n_experts * sum(one.image.slot_bytes for one in own),
                "same_bytes": True,
            }
        )
    for name in TARGETS:
        try:
            layout = target_layout(checkpoint.config, name, 0)
        except ConfigError as error:
            rows.append({"experts": name, "refused": str(error)})
            continue
        record_bytes = layout.image.slot_bytes
        rows.append(
            {
                "experts": name,
                "format": layout.format,
                "record_bytes": record_bytes,
                "bytes": checkpoint.config.n_keys * record_bytes,
                "same_bytes": all(layout == one for one in own),
            }
        )
    return rows


def layer_role(config: ModelConfig, layer: int) -> dict[str, Any]:
    """Return what a layer reads and owns."""
    own: list[str] = []
    if layer in config.kv_source_layers:
        own += ["compressor", "index keys"]
    if layer in config.index_source_layers:
        own.append("indexer")
    candidates = config.candidate_source_layer
    return {
        "layer": layer,
        "ratio": config.ratio(layer),
        "rows_from": config.kv_source(layer),
        "selection_from": config.index_source(layer),
        "own": own,
        "engram_table": config.engram_table(layer),
        "publishes_candidates": layer == candidates,
        "masked_by_candidates": 0 <= candidates < layer and layer in config.index_source_layers,
    }


def dense_places(memory: MachineMemory, dense_bytes: int) -> list[str]:
    """Return which GPUs, and whether the host, have room for the dense weights as stored."""
    places = [gpu.name for gpu in memory.gpus if gpu.n_bytes * HOST_SHARE > dense_bytes]
    return [*places, *(["host"] if memory.available_bytes * HOST_SHARE > dense_bytes else [])]


def arenas(checkpoint: Checkpoint, memory: MachineMemory, dense_bytes: int) -> list[dict[str, Any]]:
    """Return what arenas of several sizes hold, and the largest that this machine has room for."""
    n_keys = checkpoint.config.n_keys
    has_device = any(gpu.n_bytes for gpu in memory.gpus)
    room = int(memory.available_bytes * HOST_SHARE) - (0 if has_device else dense_bytes)
    rows = [
        _arena_row(checkpoint, name, size_for(checkpoint, math.ceil(n_keys * share)), room)
        for name, share in ARENA_SHARES.items()
    ]
    return [*rows, _arena_row(checkpoint, "this machine", max(room, 0), room)]


def size_for(checkpoint: Checkpoint, n_resident: int) -> int:
    """Return the smallest `--arena` in bytes that keeps so many experts beside its free pool."""
    low, high = 0, 1 << 20
    while not _holds(_planned(checkpoint, high), n_resident):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        if _holds(_planned(checkpoint, middle), n_resident):
            high = middle
        else:
            low = middle
    return high


def _planned(checkpoint: Checkpoint, size_bytes: int) -> PlannedArena | None:
    from expert_daemon.arena import plan

    try:
        return plan(
            checkpoint, size_bytes=size_bytes, max_bytes=0, top_k_batch=checkpoint.config.top_k
        )
    except ConfigError:
        return None


def _n_resident(planned: PlannedArena) -> int:
    return planned.n_slots - planned.budget.free_pool - planned.budget.hedge


def _holds(planned: PlannedArena | None, n_resident: int) -> bool:
    return planned is not None and _n_resident(planned) >= n_resident


def _arena_row(checkpoint: Checkpoint, name: str, n_bytes: int, room: int) -> dict[str, Any]:
    planned = _planned(checkpoint, max(n_bytes, 1))
    n_keys = checkpoint.config.n_keys
    return {
        "arena": name,
        "bytes": planned.n_bytes if planned and name == "this machine" else n_bytes,
        "n_slots": planned.n_slots if planned else 0,
        "resident_share": min(1.0, _n_resident(planned) / n_keys) if planned else 0.0,
        "fits": planned is not None and n_bytes <= room,
    }
