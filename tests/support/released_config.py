"""The released model's config, and the tensors of its files that a text engine skips.

Source: model specification, sections 1 and 6.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from protocol.files.model_config import ModelConfig, parse_model_config
from protocol.files.safetensors_header import dtype_bytes
from protocol.files.tensor_table import (
    ExpectedTensor,
    dense_tensors,
    expected_tensors,
    expert_tensors,
)

RELEASED_KEYS = 96_085
RELEASED_BYTES = 510_286_023_000
RELEASED_EXPERT_BYTES = 18_800_640
DRAFT_EXPERTS = 128


def released_config() -> dict[str, Any]:
    """Return the released `config.json`."""
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": 129264,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": {
            "model_type": "deepseek_v41_text",
            "vocab_size": 129280,
            "hidden_size": 5120,
            "num_hidden_layers": 40,
            "num_attention_heads": 64,
            "num_key_value_heads": 1,
            "head_dim": 512,
            "qk_rope_head_dim": 64,
            "q_lora_rank": 1280,
            "o_groups": 8,
            "o_lora_rank": 1024,
            "sliding_window": 128,
            "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
            "compress_rope_theta": 160000,
            "rope_theta": 10000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 16,
                "original_max_position_embeddings": 65536,
                "beta_fast": 32,
                "beta_slow": 1,
            },
            "max_position_embeddings": 1048576,
            "kv_source_layer_ids": [2, 8, 14, 20],
            "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
            "index_n_heads": 32,
            "index_head_dim": 128,
            "index_topk": 512,
            "candidate_source_layer_id": 20,
            "candidate_topk_blocks": 2048,
            "candidate_block_size": 8,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-06,
            "rms_norm_eps": 1e-20,
            "n_routed_experts": 384,
            "num_experts_per_tok": 6,
            "n_shared_experts": 1,
            "moe_intermediate_size": 2304,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "swiglu_limit": 10.0,
            "hidden_act": "silu",
            "engram_layer_ids": [1, 14],
            "engram_num_embeddings": [384006168, 384016682],
            "engram_max_ngram_size": 4,
            "engram_n_heads": 8,
            "engram_head_dim": 256,
            "engram_vocab_size": 16000000,
            "engram_pad_token_id": 2,
            "engram_compressed_vocab_size": 99092,
            "num_nextn_predict_layers": 3,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "attention_dropout": 0.0,
        },
    }


def released_skipped_tensors(config: ModelConfig) -> dict[str, ExpectedTensor]:
    """Return the tensors of vision tower, aligner, draft stages and image bias."""
    tensors = {
        f"layers.{layer}.ffn.gate.bias_vl": _plain("F32", config.n_experts)
        for layer in range(config.n_layers)
    }
    return tensors | _draft_tensors(config) | _vision_tensors(config)


def write_released_headers(directory: Path, *, leave_out: str = "", twice: str = "") -> None:
    """Write the released model's 48 headers over sparse data; raises OSError where that fails.

    leave_out   a tensor that no shard has
    twice       a tensor that the last shard has too
    """
    raw = released_config()
    config = parse_model_config(raw, "released")
    tensors = expected_tensors(config) | released_skipped_tensors(config)
    (directory / "config.json").write_text(json.dumps(raw))
    weight_map: dict[str, str] = {}
    headers: dict[str, dict[str, Any]] = {}
    ends: dict[str, int] = {}
    tensors.pop(leave_out, None)
    for name, tensor in [*tensors.items(), *((twice, tensors[twice]) for _ in range(bool(twice)))]:
        number = 47 if ".engram." in name or name in weight_map else _layer_shard(name)
        file_name = f"model-{number:05d}-of-00048.safetensors"
        begin = ends.get(file_name, 0)
        ends[file_name] = begin + dtype_bytes(tensor.dtype, tensor.shape)
        headers.setdefault(file_name, {})[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, ends[file_name]],
        }
        weight_map.setdefault(name, file_name)
    for file_name, header in headers.items():
        data = json.dumps(header).encode()
        with (directory / file_name).open("wb") as file:
            file.write(len(data).to_bytes(8, "little") + data)
            file.truncate(8 + len(data) + ends[file_name])
    index = {"metadata": {"total_size": sum(ends.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _layer_shard(name: str) -> int:
    """Spread layers one a shard, the rest to the last."""
    return 1 + int(name.split(".")[1]) if name.startswith("layers.") else 46


def _draft_tensors(config: ModelConfig) -> dict[str, ExpectedTensor]:
    width = config.hidden_size
    stages = replace(
        config,
        n_layers=3,
        n_experts=DRAFT_EXPERTS,
        compress_ratios=(0, 0, 0),
        kv_source_layers=(),
        index_source_layers=(),
        engram_layers=(),
        engram_n_rows=(),
    )
    blocks = dense_tensors(stages) | expert_tensors(stages)
    tensors = {
        name.replace("layers.", "mtp."): tensor
        for name, tensor in blocks.items()
        if name.startswith("layers.")
    }
    for stage in range(3):
        tensors[f"mtp.{stage}.ffn.gate.bias_vl"] = _plain("F32", DRAFT_EXPERTS)
    tensors["mtp.0.main_proj.weight"] = _plain("F8_E4M3", width, 3 * width)
    tensors["mtp.0.main_proj.scale"] = _plain("F8_E8M0", width // 32, 3 * width // 32)
    tensors["mtp.0.main_norm.weight"] = _plain("BF16", width)
    tensors["mtp.2.norm.weight"] = _plain("BF16", width)
    tensors["mtp.2.markov_head.embed.weight"] = _plain("BF16", config.vocab_size, 256)
    tensors["mtp.2.markov_head.head.weight"] = _plain("BF16", config.vocab_size, 256)
    tensors["mtp.2.confidence_head.proj.weight"] = _plain("BF16", 1, width + 256)
    return tensors


def _vision_tensors(config: ModelConfig) -> dict[str, ExpectedTensor]:
    width, vision = config.hidden_size, 1024
    shapes: dict[str, tuple[int, ...]] = {
        "vision.patch_embed.proj.weight": (vision, 588),
        "vision.patch_embed.proj.bias": (vision,),
        "vision.norm.weight": (vision,),
        "aligner.w1.weight": (width, 9 * vision),
        "aligner.w1.bias": (width,),
        "aligner.w2.weight": (width, width),
        "aligner.w2.bias": (width,),
        "image_start": (width,),
        "image_end": (width,),
        "image_newline": (width,),
    }
    for block in range(32):
        prefix = f"vision.blocks.{block}."
        shapes[prefix + "norm1.weight"] = (vision,)
        shapes[prefix + "norm2.weight"] = (vision,)
        shapes[prefix + "attn.wqkv.weight"] = (3 * vision, vision)
        shapes[prefix + "attn.wqkv.bias"] = (3 * vision,)
        shapes[prefix + "attn.wo.weight"] = (vision, vision)
        shapes[prefix + "attn.wo.bias"] = (vision,)
        shapes[prefix + "mlp.w1.weight"] = (5632, vision)
        shapes[prefix + "mlp.w2.weight"] = (vision, 2816)
    return {name: _plain("BF16", *shape) for name, shape in shapes.items()}


def _plain(dtype: str, *shape: int) -> ExpectedTensor:
    return ExpectedTensor(dtype, shape, "dense")
