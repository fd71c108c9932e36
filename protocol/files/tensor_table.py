"""The tensors that a DeepSeek-V4.1 text model consists of: name, dtype, shape, kind.

Source: model specification, section 6. Tensors of the vision tower, the aligner, the draft stages
and the image bias are skipped (`is_skipped`); everything else in a checkpoint has to stand here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from .block_sizes import FP4_PER_BYTE, TILE
from .model_config import ModelConfig

SKIPPED_PREFIXES = ("mtp.", "vision.", "aligner.", "image_")
SKIPPED_SUFFIX = ".ffn.gate.bias_vl"
_PIECE_SUFFIXES = ("w1.weight", "w1.scale", "w3.weight", "w3.scale", "w2.weight", "w2.scale")
_TABLE_NAME = re.compile(r"layers\.(\d{1,6})\.engram\.embed\.(?:weight|scale|rows)", re.ASCII)
_EXPERT_NAME = re.compile(r"layers\.(\d{1,6})\.ffn\.experts\.(\d{1,6})\.", re.ASCII)
_STACK_NAME = re.compile(r"layers\.(\d{1,6})\.ffn\.experts\.\*\.", re.ASCII)  # GGUF: all experts

Kind = Literal["dense", "expert", "engram"]


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """dtype and shape that a tensor has to have; "expert" and "engram" belong to the daemon."""

    dtype: str
    shape: tuple[int, ...]
    kind: Kind


def is_skipped(name: str) -> bool:
    """Whether a text-only engine knows the tensor and leaves it alone."""
    return name.startswith(SKIPPED_PREFIXES) or name.endswith(SKIPPED_SUFFIX)


def expert_key(name: str) -> tuple[int, int] | None:
    """Return (layer, expert) of a routed expert's tensor name, else None."""
    match = _EXPERT_NAME.match(name)
    return (int(match[1]), int(match[2])) if match else None


def is_expert(name: str) -> bool:
    """Whether a tensor is a routed expert's, or a GGUF's stack of all experts of a layer."""
    return _EXPERT_NAME.match(name) is not None or is_stack(name)


def is_stack(name: str) -> bool:
    """Whether a tensor is a GGUF's stack of all experts of a layer."""
    return _STACK_NAME.match(name) is not None


def tensor_label(name: str) -> str:
    """Return how an error names a tensor: a routed expert's with its layer and expert first."""
    key = expert_key(name)
    shown = ascii(name) if len(name) <= 200 else ascii(name[:200]) + "..."
    return f"layer {key[0]} expert {key[1]}: tensor {shown}" if key else f"tensor {shown}"


def dense_tensors(config: ModelConfig) -> dict[str, ExpectedTensor]:
    """All tensors that compute loads whole, in the order of the forward pass."""
    vocab, width = config.vocab_size, config.hidden_size
    table = _Table()
    table.bf16("embed.weight", vocab, width)
    for layer in range(config.n_layers):
        prefix = f"layers.{layer}."
        if layer in config.engram_layers:
            _add_engram(table, config, prefix + "engram.")
        _add_highway(table, config, prefix)
        _add_attention(table, config, layer, prefix + "attn.")
        _add_ffn(table, config, prefix + "ffn.")
    table.bf16("norm.weight", width)
    table.bf16("head.weight", vocab, width)
    return table.tensors


def expert_tensors(config: ModelConfig) -> dict[str, ExpectedTensor]:
    """All tensors of routed experts; the values are shared between the experts."""
    pieces = expert_pieces(config)
    tensors: dict[str, ExpectedTensor] = {}
    for layer in range(config.n_layers):
        for expert in range(config.n_experts):
            tensors.update(zip(expert_piece_names(layer, expert), pieces, strict=True))
    return tensors


def expert_pieces(config: ModelConfig) -> tuple[ExpectedTensor, ...]:
    """One expert's matrices with their scales: gate, up, down. Parallel to `expert_piece_names`."""
    width, inner = config.hidden_size, config.expert_width
    return tuple(
        piece
        for n_out, n_in in ((inner, width), (inner, width), (width, inner))
        for piece in (
            ExpectedTensor("I8", (n_out, n_in // FP4_PER_BYTE), "expert"),
            ExpectedTensor("F8_E8M0", (n_out, n_in // TILE), "expert"),
        )
    )


def expert_piece_names(layer: int, expert: int) -> tuple[str, ...]:
    """Return the tensor names of one expert's pieces in the slot's order: w1 is gate, w3 up."""
    prefix = f"layers.{layer}.ffn.experts.{expert}."
    return tuple(prefix + suffix for suffix in _PIECE_SUFFIXES)


def engram_tensors(config: ModelConfig) -> dict[str, ExpectedTensor]:
    """Values and scales of each Engram table."""
    tensors: dict[str, ExpectedTensor] = {}
    dim = config.engram_head_dim
    for layer, n_rows in zip(config.engram_layers, config.engram_n_rows, strict=True):
        prefix = f"layers.{layer}.engram.embed."
        tensors[prefix + "weight"] = ExpectedTensor("F8_E4M3", (n_rows, dim), "engram")
        tensors[prefix + "scale"] = ExpectedTensor("F8_E8M0", (n_rows, dim // TILE), "engram")
    return tensors


def engram_rows_name(layer: int) -> str:
    """Return the name of a table whose rows hold values and scales together (our own packs)."""
    return f"layers.{layer}.engram.embed.rows"


def is_engram_table(name: str, layer: int | None = None) -> bool:
    """Whether a tensor is an Engram table, or its scales, of a layer or of any."""
    match = _TABLE_NAME.fullmatch(name)
    return match is not None and (layer is None or int(match[1]) == layer)


def expected_tensors(config: ModelConfig) -> dict[str, ExpectedTensor]:
    """All tensors of the text model by name."""
    return dense_tensors(config) | expert_tensors(config) | engram_tensors(config)


class _Table:
    """Collects dense tensors by the three ways in which they are stored."""

    def __init__(self) -> None:
        self.tensors: dict[str, ExpectedTensor] = {}

    def bf16(self, name: str, *shape: int) -> None:
        self.tensors[name] = ExpectedTensor("BF16", shape, "dense")

    def fp32(self, name: str, *shape: int) -> None:
        self.tensors[name] = ExpectedTensor("F32", shape, "dense")

    def fp8(self, name: str, n_out: int, n_in: int) -> None:
        scales = (-(-n_out // TILE), -(-n_in // TILE))
        self.tensors[f"{name}.weight"] = ExpectedTensor("F8_E4M3", (n_out, n_in), "dense")
        self.tensors[f"{name}.scale"] = ExpectedTensor("F8_E8M0", scales, "dense")


def _add_engram(table: _Table, config: ModelConfig, prefix: str) -> None:
    width, streams = config.hidden_size, config.hc_mult
    table.fp8(prefix + "wkv", (streams + 1) * width, config.engram_columns * config.engram_head_dim)
    table.bf16(prefix + "q_weight", streams, width)
    table.bf16(prefix + "k_weight", streams, width)


def _add_highway(table: _Table, config: ModelConfig, prefix: str) -> None:
    streams = config.hc_mult
    n_out = (2 + streams) * streams
    for site in ("attn", "ffn"):
        table.fp32(f"{prefix}hc_{site}_fn", n_out, streams * config.hidden_size)
        table.fp32(f"{prefix}hc_{site}_base", n_out)
        table.fp32(f"{prefix}hc_{site}_scale", 3)
        table.bf16(f"{prefix}{site}_norm.weight", config.hidden_size)


def _add_attention(table: _Table, config: ModelConfig, layer: int, prefix: str) -> None:
    width, dim, rank = config.hidden_size, config.head_dim, config.q_lora_rank
    heads = config.n_heads * dim
    inner = config.o_groups * config.o_lora_rank
    table.fp32(prefix + "attn_sink", config.n_heads)
    table.fp8(prefix + "wq_a", rank, width)
    table.bf16(prefix + "q_norm.weight", rank)
    table.fp8(prefix + "wq_b", heads, rank)
    table.fp8(prefix + "wkv", dim, width)
    table.bf16(prefix + "kv_norm.weight", dim)
    table.fp8(prefix + "wo_a", inner, heads // config.o_groups)
    table.fp8(prefix + "wo_b", width, inner)
    index_dim = config.index_head_dim
    if layer in config.kv_source_layers:
        table.bf16(prefix + "compressor.wkv.weight", dim, width)
        if config.ratio(layer) > 1:
            table.bf16(prefix + "compressor.wgate.weight", dim, width)
        table.bf16(prefix + "compressor.norm.weight", dim)
        table.bf16(prefix + "indexer.wk.weight", index_dim, dim)
        table.bf16(prefix + "indexer.k_norm.weight", index_dim)
    if layer in config.index_source_layers:
        table.fp8(prefix + "indexer.wq_b", config.index_n_heads * index_dim, rank)
        table.bf16(prefix + "indexer.weights_proj.weight", config.index_n_heads, width)


def _add_ffn(table: _Table, config: ModelConfig, prefix: str) -> None:
    width, inner = config.hidden_size, config.expert_width
    table.bf16(prefix + "gate.weight", config.n_experts, width)
    table.fp32(prefix + "gate.bias", config.n_experts)
    table.fp8(prefix + "shared_experts.w1", inner, width)
    table.fp8(prefix + "shared_experts.w3", inner, width)
    table.fp8(prefix + "shared_experts.w2", width, inner)
