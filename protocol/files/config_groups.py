"""The groups of config fields, each with the values that the model can be built for.

Keys of the returned tables are the attribute names of ModelConfig.
Source: model specification, section 1.
"""

from __future__ import annotations

from typing import Any

from .block_sizes import TILE
from .config_fields import ConfigFields

MODEL_TYPE = "deepseek_v41"
TEXT_MODEL_TYPE = "deepseek_v41_text"
ARCHITECTURE = "DeepseekV41ForCausalLM"
OTHER_MODELS = {
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3",
    "deepseek_v32": "DeepSeek-V3.2",
    "deepseek_v4": "DeepSeek-V4",
}


def check_kind(root: ConfigFields) -> None:
    """Refuse another architecture and every switch whose other positions are not built."""
    found = root.raw.get("model_type")
    if isinstance(found, str) and found in OTHER_MODELS:
        raise root.refusal(
            "model_type", f"{MODEL_TYPE!r}: {OTHER_MODELS[found]} is another architecture"
        )
    root.fixed("model_type", MODEL_TYPE)
    names = root.raw.get("architectures")
    if names is not None and (not isinstance(names, list) or ARCHITECTURE not in names):
        raise root.refusal("architectures", f"a list with {ARCHITECTURE}")
    quantisation = root.inner("quantization_config")
    quantisation.fixed("quant_method", "fp8")
    quantisation.fixed("activation_scheme", "dynamic", optional=True)
    quantisation.fixed("weight_block_size", [TILE, TILE])
    quantisation.fixed("scale_fmt", "ue8m0")
    quantisation.fixed("expert_dtype", "fp4")
    text = root.inner("text_config")
    text.fixed("model_type", TEXT_MODEL_TYPE, optional=True)
    text.fixed("scoring_func", "sqrtsoftplus")
    text.fixed("topk_method", "noaux_tc")
    text.fixed("norm_topk_prob", True)
    text.fixed("hidden_act", "silu")
    text.fixed("num_key_value_heads", 1)
    text.fixed("tie_word_embeddings", False, optional=True)
    text.fixed("attention_bias", False, optional=True)
    text.fixed("attention_dropout", 0.0, optional=True)
    text.fixed("num_hash_layers", 0, optional=True)
    text.fixed("gate_temp", 1.0, optional=True)
    scaling = text.inner("rope_scaling")
    has_old_name = "type" in scaling.raw and "rope_type" not in scaling.raw
    scaling.fixed("type" if has_old_name else "rope_type", "yarn")


def attention_fields(text: ConfigFields, n_layers: int, drafts: int) -> dict[str, Any]:
    """Return what attention, compressor, indexer and candidates are made of."""
    head_dim = text.integer("head_dim", TILE, 1 << 14, multiple=TILE)
    index_head_dim = text.integer("index_head_dim", TILE, 1 << 14, multiple=TILE)
    n_heads = text.integer("num_attention_heads", 1, 4096)
    rope_dim_max = min(head_dim, index_head_dim)
    ratios = text.integers("compress_ratios", 0, 2)
    if len(ratios) not in {n_layers, n_layers + drafts}:
        wanted = f"{n_layers} or {n_layers + drafts}" if drafts else str(n_layers)
        raise text.refusal("compress_ratios", f"{wanted} entries, not {len(ratios)}")
    return {
        "n_heads": n_heads,
        "head_dim": head_dim,
        "rope_head_dim": text.integer("qk_rope_head_dim", 2, rope_dim_max, multiple=2),
        "q_lora_rank": text.integer("q_lora_rank", TILE, 1 << 17, multiple=TILE),
        "o_groups": text.integer("o_groups", 1, n_heads),
        "o_lora_rank": text.integer("o_lora_rank", 1, 1 << 17),
        "sliding_window": text.integer("sliding_window", 1, 1 << 20),
        "compress_ratios": ratios[:n_layers],
        "kv_source_layers": text.ascending("kv_source_layer_ids", 0, n_layers - 1),
        "index_source_layers": text.ascending("index_source_layer_ids", 0, n_layers - 1),
        "index_n_heads": text.integer("index_n_heads", 1, 4096),
        "index_head_dim": index_head_dim,
        "index_top_k": text.integer("index_topk", 1, 1 << 20),
        "candidate_source_layer": max(
            -1, text.integer("candidate_source_layer_id", -(1 << 31), n_layers - 1)
        ),
        "candidate_top_blocks": text.integer("candidate_topk_blocks", 0, 1 << 24),
        "candidate_block_size": text.integer("candidate_block_size", 1, 1 << 20),
    }


def rope_fields(text: ConfigFields) -> dict[str, Any]:
    """Return both rotary bases and the yarn constants."""
    scaling = text.inner("rope_scaling")
    return {
        "rope_theta": text.number("rope_theta", 1.5, 1e12),
        "compress_rope_theta": text.number("compress_rope_theta", 1.5, 1e12),
        "rope_factor": scaling.number("factor", 1, 1e6),
        "rope_original_length": scaling.integer("original_max_position_embeddings", 1, 1 << 31),
        "rope_beta_fast": scaling.number("beta_fast", 1e-6, 1e6),
        "rope_beta_slow": scaling.number("beta_slow", 1e-6, 1e6),
    }


def stream_fields(text: ConfigFields) -> dict[str, Any]:
    """Return the width and the residual streams."""
    return {
        "hidden_size": text.integer("hidden_size", TILE, 1 << 17, multiple=TILE),
        "hc_mult": text.integer("hc_mult", 1, 16),
        "hc_sinkhorn_iters": text.integer("hc_sinkhorn_iters", 1, 1000),
        "hc_eps": text.number("hc_eps", 1e-30, 1),
    }


def engram_fields(text: ConfigFields, n_layers: int, vocab: int) -> dict[str, Any]:
    """Return the Engram tables and their hash."""
    layers = text.ascending("engram_layer_ids", 0, n_layers - 1)
    n_rows = text.integers("engram_num_embeddings", 1, (1 << 32) - 1)  # a row number is a u32
    if len(n_rows) != len(layers):
        raise text.refusal("engram_num_embeddings", f"{len(layers)} entries, one an Engram layer")
    return {
        "engram_layers": layers,
        "engram_n_rows": n_rows,
        "engram_max_ngram": text.integer("engram_max_ngram_size", 2, 16),
        "engram_n_heads": text.integer("engram_n_heads", 1, 256),
        "engram_head_dim": text.integer("engram_head_dim", TILE, 1 << 14, multiple=TILE),
        "engram_first_prime": text.integer("engram_vocab_size", 2, 1 << 31),
        "engram_pad_id": text.integer("engram_pad_token_id", 0, vocab - 1),
        "engram_compressed_vocab": text.integer("engram_compressed_vocab_size", 1, vocab),
    }
