"""The whole decode step of the released sizes on a GPU, against the time its bytes take to read.

Dense weights and expert slots are made on the device; every key of the model points at one of the
slots that fit, so a step reads what a step without misses reads. Used by bench/step.py.
"""

from __future__ import annotations

import sys
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.block_parts import tame
from bench.timing import seconds, wall_seconds
from compute.experts.arena_view import PieceShapes
from compute.experts.tiers import ExpertTiers
from compute.graph.decode_step import DecodeStep
from compute.model.matrix import BF16, FP8, StoredMatrix
from compute.model.model import Model
from compute.model.precision import Precision
from compute.model.sequence import Sequence
from compute.model.weights import (
    AttentionWeights,
    CompressorWeights,
    EngramWeights,
    HighwayWeights,
    LayerWeights,
    ModelWeights,
    MoeWeights,
)
from kernels.block_words import UNITS
from protocol.files.model_config import ModelConfig, parse_model_config
from protocol.files.slice_map import FP4, ROW_E4M3
from tests.support.released_config import released_config

DEVICE = torch.device("cuda")
Formats = tuple[str, str, str]  # of gate, up and down
OFFICIAL: Formats = (FP4, FP4, FP4)
FREE_BYTES = 12 << 30  # left for activations, graphs and the ceilings' own tensors
CONTEXT = 8192


def config_of(n_layers: int) -> ModelConfig:
    """Return the released config, or its first layers with every kind of source among them."""
    config = parse_model_config(released_config(), "released")
    if n_layers >= config.n_layers:
        return config
    keep = [layer for layer in config.kv_source_layers if layer < n_layers]
    index = [layer for layer in config.index_source_layers if layer < n_layers]
    source = config.candidate_source_layer
    return replace(
        config,
        n_layers=n_layers,
        compress_ratios=config.compress_ratios[:n_layers],
        kv_source_layers=tuple(keep),
        index_source_layers=tuple(index),
        candidate_source_layer=source if source < n_layers else -1,
        engram_layers=tuple(layer for layer in config.engram_layers if layer < n_layers),
        engram_n_rows=config.engram_n_rows[: sum(la < n_layers for la in config.engram_layers)],
    )


def fp8(n: int, k: int, groups: int = 1) -> StoredMatrix:
    """Return a matrix of random codes whose products stay near one."""
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8, device=DEVICE)
    codes = torch.where((codes & 127) > 100, codes - 28, codes)
    scales = torch.full((-(-n // 32), -(-k // 32)), 119, dtype=torch.uint8, device=DEVICE)
    return StoredMatrix(codes, scales, FP8, k, groups)


def bf16(n: int, k: int) -> StoredMatrix:
    """Return a bf16 matrix of random values."""
    values = torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) * k**-0.5
    return StoredMatrix(values, None, BF16, k)


def ones(*shape: int) -> torch.Tensor:
    """Return f32 ones."""
    return torch.ones(shape, device=DEVICE)


def highway(c: ModelConfig) -> HighwayWeights:
    """Return random mHC coefficients."""
    lines = c.hc_mult * (c.hc_mult + 2)
    fn = torch.randn(lines, c.hc_mult * c.hidden_size, device=DEVICE) * 0.01
    return HighwayWeights(fn, ones(lines) * 0.1, torch.zeros(lines, device=DEVICE))


def layer_of(c: ModelConfig, layer: int, formats: Formats) -> LayerWeights:
    """Return a layer's dense weights."""
    is_index, is_source = layer in c.index_source_layers, layer in c.kv_source_layers
    width = c.index_n_heads * c.index_head_dim
    compressor = None
    if is_source:
        parts = 2 if c.ratio(layer) > 1 else 1
        compressor = CompressorWeights(
            bf16(parts * c.head_dim, c.hidden_size),
            ones(c.head_dim),
            bf16(c.index_head_dim, c.head_dim),
            ones(c.index_head_dim),
        )
    engram = None
    if layer in c.engram_layers:
        n, k = (c.hc_mult + 1) * c.hidden_size, c.engram_columns * c.engram_head_dim
        weight = ones(c.hc_mult, c.hidden_size)
        engram = EngramWeights(ROW_E4M3, c.engram_row_bytes, fp8(n, k), weight)
    attention = AttentionWeights(
        qa_kv=fp8(c.q_lora_rank + c.head_dim, c.hidden_size),
        q_norm=ones(c.q_lora_rank),
        kv_norm=ones(c.head_dim),
        q_b=fp8(c.n_heads * c.head_dim, c.q_lora_rank),
        sink=torch.zeros(c.n_heads, device=DEVICE),
        o_a=fp8(c.o_groups * c.o_lora_rank, c.n_heads * c.head_dim // c.o_groups, c.o_groups),
        o_b=fp8(c.hidden_size, c.o_groups * c.o_lora_rank),
        index_q=fp8(width, c.q_lora_rank) if is_index else None,
        index_heads=bf16(c.index_n_heads, c.hidden_size) if is_index else None,
        compressor=compressor,
    )
    moe = MoeWeights(
        formats=formats,
        router=bf16(c.n_experts, c.hidden_size).values,
        bias=torch.zeros(c.n_experts, device=DEVICE),
        shared_gate_up=fp8(2 * c.expert_width, c.hidden_size),
        shared_down=fp8(c.hidden_size, c.expert_width),
    )
    norm = ones(c.hidden_size)
    return LayerWeights(highway(c), norm, attention, highway(c), norm, moe, engram)


def model_of(config: ModelConfig, formats: Formats = OFFICIAL) -> Model:
    """Return a model of random dense weights, official ones, whose experts have such formats."""
    embed = torch.randn(config.vocab_size, config.hidden_size, device=DEVICE, dtype=torch.bfloat16)
    weights = ModelWeights(
        embed=embed,
        layers=tuple(layer_of(config, layer, formats) for layer in range(config.n_layers)),
        norm=ones(config.hidden_size),
        head=bf16(config.vocab_size, config.hidden_size),
    )
    token_map = np.arange(config.vocab_size, dtype=np.int64) % config.engram_compressed_vocab
    return Model(config, weights, token_map, Precision.HIGHWAY, DEVICE)


def pieces_of(config: ModelConfig, formats: Formats = OFFICIAL) -> tuple[PieceShapes, int]:
    """Return where an expert's pieces stand in a slot, and the slot's bytes."""
    w, h = config.expert_width, config.hidden_size
    shapes: tuple[tuple[int, int], ...]
    if formats == OFFICIAL:
        shapes = ((w, h // 2), (w, h // 32), (w, h // 2), (w, h // 32), (h, w // 2), (h, w // 32))
    else:
        n_bytes = [UNITS[name].block_bytes for name in formats]  # of 256 values
        gate, up, down = (k // 256 * n for k, n in zip((h, h, w), n_bytes, strict=True))
        shapes = ((w, gate), (0, 0), (w, up), (0, 0), (h, down), (0, 0))
    offsets, at = [], 0
    for out, row in shapes:
        offsets.append(at)
        at += -(-out * row // 256) * 256
    return PieceShapes(tuple(offsets), shapes), -(-at // 4096) * 4096


def tiers_of(config: ModelConfig, formats: Formats = OFFICIAL) -> ExpertTiers:
    """Return a table in which every key points at one of the slots that fit."""
    pieces, slot_bytes = pieces_of(config, formats)
    free, _ = torch.cuda.mem_get_info()
    n_slots = min(config.n_keys, max(64, (free - FREE_BYTES) // slot_bytes))
    layers = config.n_layers
    tiers = ExpertTiers(
        [pieces] * layers, [formats] * layers, config.n_experts, slot_bytes, n_slots, DEVICE
    )
    for slot in tiers.cache:
        slot.random_(0, 256)
        for piece, (at, (out, row)) in enumerate(zip(pieces.offsets, pieces.shapes, strict=True)):
            stored = slot[at : at + out * row]
            if formats == OFFICIAL and piece % 2:
                stored[:] = 118
            elif row and formats != OFFICIAL:
                name = formats[piece // 2]
                tame(stored.view(-1, UNITS[name].block_bytes), name)
    tiers.set_arena(np.zeros(0, np.int64))
    keys = np.arange(config.n_keys).reshape(layers, config.n_experts)
    tiers.replace((keys % n_slots).astype(np.int32))
    return tiers


def token_bytes(model: Model, tiers: ExpertTiers) -> int:
    """Return the bytes of weights that one token reads."""
    config = model.config
    dense = sum(n_bytes(block.weights) for block in model.blocks)
    return dense + n_bytes(model.head.matrix) + config.n_layers * config.top_k * tiers.slot_bytes


def n_bytes(value: Any) -> int:
    """Return the bytes of every tensor in a tree of dataclasses."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if is_dataclass(value) and not isinstance(value, type):
        return sum(n_bytes(getattr(value, field.name)) for field in fields(value))
    return 0


def whole_step(
    n_layers: int, repeats: int, copy_tb_s: float, formats: Formats = OFFICIAL
) -> dict[str, float]:
    """Return the step's time by one graph and eagerly, and its share of the floor's rate.

    formats  of the experts; dense weights are official ones
    """
    config = config_of(n_layers)
    model = model_of(config, formats)
    tiers = tiers_of(config, formats)
    step = DecodeStep(model, Sequence(config, CONTEXT, DEVICE, Precision.HIGHWAY), tiers)
    step.buffers.staged_inputs.copy_(torch.tensor([17, 4001]))
    step.extend_reach(4001)

    def launch() -> None:
        step.embed()
        step.layers(0, config.n_layers)
        step.head()

    with torch.inference_mode():
        graph = seconds(launch, repeats)
        eager = wall_seconds(launch, repeats)
        assert int(step.buffers.headers[:, 0].sum()) == 0, "a pick was absent"
        assert bool(step.buffers.logits.isfinite().all()), "the logits are not finite"
        floor = token_bytes(model, tiers) / (copy_tb_s * 1e12)
        found = {
            "step_layers": n_layers,
            "step_slots": tiers.n_device,
            "step_gb": token_bytes(model, tiers) / 1e9,
            "step_floor_ms": floor * 1e3,
            "step_graph_ms": graph * 1e3,
            "step_eager_ms": eager * 1e3,
            "step_fraction": floor / graph,
            "step_graph_vs_eager": eager / graph,
        }
        return found | parts(step, repeats)


def parts(step: DecodeStep, repeats: int) -> dict[str, float]:
    """Return microseconds of each kind of layer's halves, and of the head."""
    config = step.model.config
    kinds = {
        "window": 0,
        "engram": 1,
        "source2": 2,
        "shared_rows": 3,
        "source1": 20,
        "index1": 24,
    }
    found = {}
    for name, layer in kinds.items():
        if layer < config.n_layers:
            call = partial(step.attention, layer)
            found[f"attention_{name}_us"] = seconds(call, repeats, copies=4) * 1e6
    last = config.n_layers - 1
    found["experts_us"] = seconds(lambda: step.experts(last), repeats, copies=4) * 1e6
    found["head_us"] = seconds(step.head, repeats, copies=2) * 1e6
    return found
