"""The model config of a GGUF: its metadata and the presence of tensors, as a ModelConfig.

What llama.cpp's metadata lacks is derived or takes the released model's value: kv sources are the
layers with a compressor, index sources those with an indexer query, the candidate source is the
first index source of ratio 1 with 2048 blocks of 8. Whatever took a default is listed, never
silent. The result has passed every check that a `config.json` passes.
Source: model specification, section 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from protocol.errors import ConfigError

from .config_groups import ARCHITECTURE, MODEL_TYPE, TEXT_MODEL_TYPE
from .gguf_engram import RELEASED_VOCABULARY, GgufEngram, check_hash, read_engram
from .gguf_fields import GgufFields
from .gguf_header import GgufTensor
from .gguf_index import GgufIndex
from .gguf_names import by_official_name
from .model_config import ModelConfig, parse_model_config

GGUF_ARCHITECTURE = "deepseek41"
IMAGE_TEXT = "<\uff5cdeepseek_image\uff5c>"
RELEASED_IMAGE_ID = 129_264


@dataclass(frozen=True, slots=True)
class GgufModel:
    """What a GGUF says of its model."""

    config: ModelConfig
    engram: GgufEngram
    defaulted: tuple[str, ...]  # metadata keys that are missing and took their default


def read_gguf_config(index: GgufIndex) -> GgufModel:
    """Return the checked config of a GGUF; raises ConfigError or ShardError."""
    path = index.shards[0].path
    found = index.metadata.get("general.architecture")
    if found != GGUF_ARCHITECTURE:
        raise ConfigError(
            f"{path}: general.architecture is {ascii(found)[:80]}, wanted {GGUF_ARCHITECTURE!r}"
        )
    fields = GgufFields(index.metadata, path, GGUF_ARCHITECTURE)
    tensors = by_official_name(index.tensors)
    text = _text_config(fields, tensors)
    engram, engram_text = read_engram(fields, tensors, text["vocab_size"])
    raw = {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "bos_token_id": fields.integer(".tokenizer.ggml.bos_token_id", default=0),
        "eos_token_id": fields.integer(".tokenizer.ggml.eos_token_id", default=1),
        "pad_token_id": fields.integer(".tokenizer.ggml.padding_token_id", default=2),
        "image_token_id": _image_id(fields, text["vocab_size"]),
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text | engram_text,
    }
    config = parse_model_config(raw, str(path))
    check_hash(fields, config, engram)
    return GgufModel(config, engram, tuple(fields.defaulted))


def _text_config(fields: GgufFields, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    n_layers = _n_layers(fields, tensors)
    ratios = fields.integers("attention.compress_ratios")
    if ratios is None or len(ratios) < n_layers:
        raise fields.refusal(fields.key("attention.compress_ratios"), f"{n_layers} integers")
    ratios = ratios[:n_layers]  # entries of draft stages follow
    layers = range(n_layers)
    kv = [i for i in layers if f"layers.{i}.attn.compressor.wkv.weight" in tensors]
    selecting = [i for i in layers if f"layers.{i}.attn.indexer.wq_b.weight" in tensors]
    return {
        "model_type": TEXT_MODEL_TYPE,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 0,
        "num_hidden_layers": n_layers,
        "vocab_size": _embedding(fields, tensors).dims[1],
        "compress_ratios": list(ratios),
        "kv_source_layer_ids": kv,
        "index_source_layer_ids": selecting,
        "candidate_source_layer_id": next((i for i in selecting if ratios[i] == 1), -1),
        "candidate_topk_blocks": fields.integer(
            "attention.indexer.candidate_top_blocks", default=2048
        ),
        "candidate_block_size": fields.integer("attention.indexer.candidate_block_size", default=8),
        **_sizes(fields),
        **_rope(fields),
    }


def _sizes(fields: GgufFields) -> dict[str, Any]:
    return {
        "hidden_size": fields.integer("embedding_length"),
        "max_position_embeddings": fields.integer("context_length", default=1 << 20),
        "num_attention_heads": fields.integer("attention.head_count"),
        "head_dim": fields.integer("attention.key_length"),
        "q_lora_rank": fields.integer("attention.q_lora_rank"),
        "o_groups": fields.integer("attention.output_group_count"),
        "o_lora_rank": fields.integer("attention.output_lora_rank"),
        "sliding_window": fields.integer("attention.sliding_window"),
        "index_n_heads": fields.integer("attention.indexer.head_count"),
        "index_head_dim": fields.integer("attention.indexer.key_length"),
        "index_topk": fields.integer("attention.indexer.top_k"),
        "hc_mult": fields.integer("hyper_connection.count"),
        "hc_sinkhorn_iters": fields.integer("hyper_connection.sinkhorn_iterations"),
        "hc_eps": fields.number("hyper_connection.epsilon", default=1e-6),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", default=1e-20),
        "n_routed_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "n_shared_experts": fields.integer("expert_shared_count", default=1),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "routed_scaling_factor": fields.number("expert_weights_scale"),
        "swiglu_limit": fields.number("swiglu_limit", "swiglu_clamp_exp", default=10.0),
    }


def _rope(fields: GgufFields) -> dict[str, Any]:
    # Where the window layers have a base of their own, the plain key is the compressed layers'.
    if fields.find("rope.freq_base_swa"):
        window = fields.number("rope.freq_base_swa")
        compressed = fields.number("rope.freq_base", default=160_000.0)
    else:
        window = fields.number("rope.freq_base", default=10_000.0)
        compressed = fields.number(
            "attention.compress_rope_freq_base",
            "rope.compress_freq_base",
            "rope.freq_base_compress",
            default=160_000.0,
        )
    return {
        "qk_rope_head_dim": fields.integer("rope.dimension_count"),
        "rope_theta": window,
        "compress_rope_theta": compressed,
        "rope_scaling": {
            "rope_type": fields.text("rope.scaling.type", "yarn"),
            "factor": fields.number("rope.scaling.factor", default=16.0),
            "original_max_position_embeddings": fields.integer(
                "rope.scaling.original_context_length", default=65_536
            ),
            "beta_fast": fields.number("rope.scaling.yarn_beta_fast", default=32.0),
            "beta_slow": fields.number("rope.scaling.yarn_beta_slow", default=1.0),
        },
    }


def _n_layers(fields: GgufFields, tensors: Mapping[str, GgufTensor]) -> int:
    """Count the layers that have tensors; draft stages may add to the block count."""
    n_layers = next(i for i in count() if f"layers.{i}.attn_norm.weight" not in tensors)
    drafts = fields.metadata.get(fields.key("nextn_predict_layers"), 0)
    said = fields.integer("block_count")
    if n_layers == 0 or said not in {n_layers, n_layers + drafts if type(drafts) is int else -1}:
        raise fields.refusal(
            fields.key("block_count"), f"{n_layers}, the number of layers with tensors"
        )
    return n_layers


def _embedding(fields: GgufFields, tensors: Mapping[str, GgufTensor]) -> GgufTensor:
    embedding = tensors.get("embed.weight")
    if embedding is None or len(embedding.dims) != 2:
        raise ConfigError(f"{fields.path}: has no tensor 'token_embd.weight' of two dimensions")
    return embedding


def _image_id(fields: GgufFields, vocab_size: int) -> int:
    key = fields.find("image_token_id")
    if key is not None:
        return fields.integer("image_token_id")
    tokens = fields.array("tokenizer.ggml.tokens")
    if tokens is not None:
        for number, token in enumerate(tokens.strings()):
            if token == IMAGE_TEXT:
                return number
    if vocab_size != RELEASED_VOCABULARY:
        raise fields.refusal(
            "tokenizer.ggml.tokens", f"a list with {IMAGE_TEXT}, for no other key has its id"
        )
    return fields.integer("image_token_id", default=RELEASED_IMAGE_ID)
