"""The dense weights of a model, by module, as the forward pass uses them.

What a row is multiplied with is a Matrix: f32 on the CPU, as stored on a GPU; everything else is
f32. The embedding and routers stay bf16 where they are stored so.
Matrices that read the same input are stacked, so that one product serves them where they are
stored alike.
Invariants: nothing here comes from a routed expert or an Engram table; no file is open afterwards.
Source of names and roles: model specification, section 6.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.files.checkpoint import Checkpoint
from protocol.files.model_config import ModelConfig
from protocol.files.slice_map import EngramTable

from .matrix import Matrix
from .tensor_reader import TensorReader


@dataclass(frozen=True, slots=True)
class HighwayWeights:
    """The mHC coefficients of one site."""

    fn: Tensor  # [S * (S + 2), S * H]
    scale: Tensor  # [S * (S + 2)], the file's three repeated
    base: Tensor  # [S * (S + 2)]


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """What a kv source makes compressed rows and index keys of."""

    kv_gate: Matrix  # [k or 2k, H]: wkv, and wgate where the ratio is 2
    norm: Tensor  # [k]
    key: Matrix  # [index k, k]
    key_norm: Tensor  # [index k]


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """One attention site; the index parts where the layer has them."""

    qa_kv: Matrix  # [q rank + k, H]: wq_a, wkv
    q_norm: Tensor
    kv_norm: Tensor
    q_b: Matrix  # [heads * k, q rank]
    sink: Tensor  # [heads]
    o_a: Matrix  # [groups, o rank, heads / groups * k]
    o_b: Matrix  # [H, groups * o rank]
    index_q: Matrix | None  # [index heads * index k, q rank], index sources
    index_heads: Matrix | None  # [index heads, H], index sources
    compressor: CompressorWeights | None  # kv sources


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Router and shared expert of one layer, and how its routed experts are stored."""

    formats: tuple[str, str, str]  # of gate, up and down: "FP4", or a block format's name
    router: Tensor  # [E, H] bf16 or f32
    bias: Tensor  # [E]
    shared_gate_up: Matrix  # [2 * width, H]: w1, w3
    shared_down: Matrix  # [H, width]


@dataclass(frozen=True, slots=True)
class EngramWeights:
    """What turns Engram rows into keys and a value, and how a row is stored."""

    row_format: str  # "E4M3" with its scales behind it, or a block format's name
    row_bytes: int  # of the table; a row of the ring may be longer
    kv: Matrix  # [(S + 1) * H, columns * k]
    weight: Tensor  # [S, H], query weight * key weight


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block."""

    attention_mix: HighwayWeights
    attention_norm: Tensor
    attention: AttentionWeights
    ffn_mix: HighwayWeights
    ffn_norm: Tensor
    moe: MoeWeights
    engram: EngramWeights | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The whole model but for routed experts and Engram tables."""

    embed: Tensor  # [vocab, H] bf16 or f32
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Matrix  # [vocab, H]


def load_weights(checkpoint: Checkpoint, device: torch.device) -> ModelWeights:
    """Read all dense tensors to `device`; raises ShardError."""
    config = checkpoint.config
    with TensorReader(checkpoint.tensors, device) as reader:
        return ModelWeights(
            embed=reader.bf16_or_f32("embed.weight"),
            layers=tuple(_layer(reader, checkpoint, layer) for layer in range(config.n_layers)),
            norm=reader.f32("norm.weight"),
            head=reader.matrix("head.weight"),
        )


def _layer(reader: TensorReader, checkpoint: Checkpoint, layer: int) -> LayerWeights:
    config, name = checkpoint.config, f"layers.{layer}"
    formats = checkpoint.slice_map.layouts[layer].formats
    number = config.engram_table(layer)
    table = None if number is None else checkpoint.engram_tables[number]
    return LayerWeights(
        attention_mix=_highway(reader, config, f"{name}.hc_attn"),
        attention_norm=reader.f32(f"{name}.attn_norm.weight"),
        attention=_attention(reader, config, layer),
        ffn_mix=_highway(reader, config, f"{name}.hc_ffn"),
        ffn_norm=reader.f32(f"{name}.ffn_norm.weight"),
        moe=_moe(reader, f"{name}.ffn", formats),
        engram=None if table is None else _engram(reader, f"{name}.engram", table),
    )


def _highway(reader: TensorReader, config: ModelConfig, name: str) -> HighwayWeights:
    n = config.hc_mult
    scale = reader.f32(f"{name}_scale")
    spread = torch.cat([scale[i].expand(width) for i, width in enumerate((n, n, n * n))])
    return HighwayWeights(reader.f32(f"{name}_fn"), spread, reader.f32(f"{name}_base"))


def _attention(reader: TensorReader, config: ModelConfig, layer: int) -> AttentionWeights:
    name = f"layers.{layer}.attn"
    index_source = layer in config.index_source_layers
    index = f"{name}.indexer"
    return AttentionWeights(
        qa_kv=reader.matrix(f"{name}.wq_a.weight", f"{name}.wkv.weight"),
        q_norm=reader.f32(f"{name}.q_norm.weight"),
        kv_norm=reader.f32(f"{name}.kv_norm.weight"),
        q_b=reader.matrix(f"{name}.wq_b.weight"),
        sink=reader.f32(f"{name}.attn_sink"),
        o_a=reader.matrix(f"{name}.wo_a.weight", groups=config.o_groups),
        o_b=reader.matrix(f"{name}.wo_b.weight"),
        index_q=reader.matrix(f"{index}.wq_b.weight") if index_source else None,
        index_heads=reader.matrix(f"{index}.weights_proj.weight") if index_source else None,
        compressor=_compressor(reader, config, layer),
    )


def _compressor(reader: TensorReader, config: ModelConfig, layer: int) -> CompressorWeights | None:
    if layer not in config.kv_source_layers:
        return None
    name = f"layers.{layer}.attn.compressor"
    index = f"layers.{layer}.attn.indexer"
    parts = ["wkv", "wgate"] if config.ratio(layer) > 1 else ["wkv"]
    return CompressorWeights(
        kv_gate=reader.matrix(*(f"{name}.{part}.weight" for part in parts)),
        norm=reader.f32(f"{name}.norm.weight"),
        key=reader.matrix(f"{index}.wk.weight"),
        key_norm=reader.f32(f"{index}.k_norm.weight"),
    )


def _moe(reader: TensorReader, name: str, formats: tuple[str, str, str]) -> MoeWeights:
    shared = f"{name}.shared_experts"
    return MoeWeights(
        formats=formats,
        router=reader.bf16_or_f32(f"{name}.gate.weight"),
        bias=reader.f32(f"{name}.gate.bias"),
        shared_gate_up=reader.matrix(f"{shared}.w1.weight", f"{shared}.w3.weight"),
        shared_down=reader.matrix(f"{shared}.w2.weight"),
    )


def _engram(reader: TensorReader, name: str, table: EngramTable) -> EngramWeights:
    return EngramWeights(
        row_format=table.format,
        row_bytes=table.row_bytes,
        kv=reader.matrix(f"{name}.wkv.weight"),
        weight=reader.f32(f"{name}.q_weight") * reader.f32(f"{name}.k_weight"),
    )
