"""Tiny checkpoints of the official layout, from a seed, without torch: for tests of every room.

Names, dtypes and block formats are the official ones. Values are random but tame: matrices have
about unit gain, so that a forward pass stays finite. Same arguments, same bytes; a tensor's bytes
depend on the seed and on its name and shape alone.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from protocol.files.config_rules import primes_from
from protocol.files.model_config import ModelConfig, parse_model_config
from protocol.files.safetensors_header import LENGTH_BYTES
from protocol.files.safetensors_index import INDEX_NAME, SINGLE_NAME, load_index
from protocol.files.tensor_table import ExpectedTensor, expected_tensors, is_skipped

N_DRAFT_STAGES = 1
FILE_ORDER = ("F32", "BF16", "F8_E8M0", "F8_E4M3", "U8", "I8")  # as in the official files


class RawTensor(NamedTuple):
    """A tensor as it lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def fake_config(
    *,
    n_layers: int = 8,
    n_experts: int = 8,
    top_k: int = 2,
    hidden_size: int = 64,
    expert_width: int = 32,
    vocab_size: int = 64,
    text_config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a `config.json`; `text_config` replaces or adds fields of the inner object.

    Layer 0 is window only, 1 has an Engram, 2 is a ratio 2 source, 3 its consumer, 4 a second ratio
    2 source with an Engram, 5 the ratio 1 and candidate source, 6 its consumer, 7 an index source
    under the candidate mask; further layers consume. Fewer layers cut the list.
    """
    ratios = ([0, 0, 2, 2, 2] + [1] * n_layers)[:n_layers]
    text: dict[str, Any] = {
        "model_type": "deepseek_v41_text",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "moe_intermediate_size": expert_width,
        "num_hidden_layers": n_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 32,
        "o_lora_rank": 16,
        "o_groups": 2,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": 4096,
        "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 64,
        },
        "n_routed_experts": n_experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": top_k,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 8,
        "compress_ratios": ratios + [0] * N_DRAFT_STAGES,
        "compress_rope_theta": 160000,
        "kv_source_layer_ids": [layer for layer in (2, 4, 5) if layer < n_layers],
        "index_source_layer_ids": [layer for layer in (2, 4, 5, 7) if layer < n_layers],
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 8,
        "candidate_source_layer_id": 5 if n_layers > 5 else -1,
        "candidate_topk_blocks": 3,
        "candidate_block_size": 4,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-06,
        "engram_layer_ids": [layer for layer in (1, 4) if layer < n_layers],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 20,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": (vocab_size + 1) // 2,
        "num_nextn_predict_layers": N_DRAFT_STAGES,
    }
    text.update(text_config or {})
    if "engram_num_embeddings" not in text:
        columns = (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"]
        n_tables = len(text["engram_layer_ids"])
        primes = primes_from(text["engram_vocab_size"], columns * n_tables)
        text["engram_num_embeddings"] = [
            sum(primes[columns * table : columns * (table + 1)]) for table in range(n_tables)
        ]
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": vocab_size - 1,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text,
    }


def write_fake_checkpoint(
    directory: Path,
    *,
    seed: int = 0,
    n_shards: int = 3,
    single_file: bool = False,
    skipped: bool = True,
    n_layers: int = 8,
    n_experts: int = 8,
    top_k: int = 2,
    hidden_size: int = 64,
    expert_width: int = 32,
    vocab_size: int = 64,
    text_config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a whole model directory and return it.

    Engram and skipped tensors stand in the last shard, layers spread over the others. `single_file`
    writes `model.safetensors` without an index; `skipped` adds tensors that an engine leaves alone.
    """
    raw = fake_config(
        n_layers=n_layers,
        n_experts=n_experts,
        top_k=top_k,
        hidden_size=hidden_size,
        expert_width=expert_width,
        vocab_size=vocab_size,
        text_config=text_config,
    )
    config = parse_model_config(raw, "fake config")
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", raw)
    _write_json(directory / "tokenizer.json", word_tokenizer(vocab_size))
    _write_json(directory / "engram_token_map.json", [token // 2 for token in range(vocab_size)])
    tensors = fake_tensors(config, seed, skipped=skipped)
    if single_file:
        write_safetensors(directory / SINGLE_NAME, tensors)
        return directory
    files = [f"model-{number + 1:05d}-of-{n_shards:05d}.safetensors" for number in range(n_shards)]
    weight_map = {name: files[_shard_of(name, config, n_shards)] for name in tensors}
    for file_name in sorted(set(weight_map.values())):
        part = {name: tensors[name] for name in tensors if weight_map[name] == file_name}
        write_safetensors(directory / file_name, part)
    write_index(directory, weight_map, sum(len(tensor.data) for tensor in tensors.values()))
    return directory


def fake_tensors(config: ModelConfig, seed: int, *, skipped: bool = True) -> dict[str, RawTensor]:
    """Return every tensor of the model, and some that an engine skips."""
    wanted = expected_tensors(config)
    if skipped:
        wanted = wanted | _skipped_tensors(config)
    return {
        name: RawTensor(tensor.dtype, tensor.shape, _fake_data(name, tensor, seed))
        for name, tensor in wanted.items()
    }


def write_safetensors(path: Path, tensors: Mapping[str, RawTensor]) -> None:
    """Write one file in the library's order: wide dtypes first, then by name."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts: list[bytes] = []
    end = 0
    for name in sorted(tensors, key=lambda name: (FILE_ORDER.index(tensors[name].dtype), name)):
        tensor = tensors[name]
        begin, end = end, end + len(tensor.data)
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        parts.append(tensor.data)
    _write_parts(path, json.dumps(header, separators=(",", ":")).encode(), b"".join(parts))


def write_index(directory: Path, weight_map: Mapping[str, str], n_bytes: int) -> None:
    """Write `model.safetensors.index.json`."""
    index = {"metadata": {"total_size": n_bytes}, "weight_map": dict(weight_map)}
    _write_json(directory / INDEX_NAME, index)


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite a shard's header: `change` edits the parsed one; bytes that it returns go in raw."""
    content = path.read_bytes()
    n_header = int.from_bytes(content[:LENGTH_BYTES], "little")
    header = json.loads(content[LENGTH_BYTES : LENGTH_BYTES + n_header])
    result = change(header)
    data = result if isinstance(result, bytes) else json.dumps(header).encode()
    _write_parts(path, data, content[LENGTH_BYTES + n_header :])


def edit_config(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite `config.json` in place."""
    raw = json.loads((directory / "config.json").read_text())
    change(raw)
    _write_json(directory / "config.json", raw)


def blank_daemon_bytes(directory: Path) -> None:
    """Overwrite with zeros every byte that belongs to the daemon: routed experts, Engram tables."""
    config = parse_model_config(json.loads((directory / "config.json").read_text()), "config")
    index = load_index(directory)
    for name, wanted in expected_tensors(config).items():
        if wanted.kind != "dense":
            entry = index.tensors[name]
            with entry.shard.path.open("r+b") as file:
                file.seek(entry.offset)
                file.write(bytes(entry.n_bytes))


def word_tokenizer(vocab_size: int) -> dict[str, Any]:
    """Return a tokenizer.json of words: id 2k is `wk`, 2k+1 is `Wk`; compressed ids are id // 2."""
    words = [f"{'wW'[token % 2]}{token // 2}" for token in range(vocab_size)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: token for token, word in enumerate(words)},
            "unk_token": words[-2],
        },
    }


def _skipped_tensors(config: ModelConfig) -> dict[str, ExpectedTensor]:
    width = config.hidden_size
    tensors = {
        "mtp.0.main_norm.weight": ExpectedTensor("BF16", (width,), "dense"),
        "mtp.0.ffn.experts.0.w1.weight": ExpectedTensor("I8", (4, width // 2), "dense"),
        "vision.norm.weight": ExpectedTensor("BF16", (width,), "dense"),
        "aligner.w1.bias": ExpectedTensor("BF16", (width,), "dense"),
        "image_start": ExpectedTensor("BF16", (width,), "dense"),
    }
    for layer in range(config.n_layers):
        name = f"layers.{layer}.ffn.gate.bias_vl"
        tensors[name] = ExpectedTensor("F32", (config.n_experts,), "dense")
    return tensors


def _fake_data(name: str, tensor: ExpectedTensor, seed: int) -> bytes:
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    shape = tensor.shape
    if tensor.dtype in {"F32", "BF16"}:
        values = _leftover_values(name, random.standard_normal(shape))
        bits = np.ascontiguousarray(values, "<f4").view("<u4")
        if tensor.dtype == "F32":
            return bits.tobytes()
        rounded = bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)
        return (rounded >> 16).astype("<u2").tobytes()
    if tensor.dtype == "F8_E4M3":  # magnitudes from 0 to 4, all codes below 0x49
        signs = random.integers(0, 2, shape, np.uint8) << 7
        return (random.integers(0, 0x49, shape, np.uint8) | signs).tobytes()
    if tensor.dtype == "F8_E8M0":
        root_mean_square = 2.9 if tensor.kind == "expert" else 1.2  # of the weights' codes
        fan_in = 1 if tensor.kind == "engram" else shape[-1] * 32
        base = 127 - round(np.log2(root_mean_square * fan_in**0.5))
        return random.integers(base - 1, base + 2, shape, np.uint8).tobytes()
    return random.integers(0, 256, shape, np.uint8).tobytes()


def _leftover_values(name: str, normal: Any) -> Any:
    """Turn standard normals into what an unquantised tensor of that name holds."""
    if name.endswith(("_base", "_scale", "gate.bias", "gate.bias_vl")):
        return 0.1 * normal
    if normal.ndim == 1 and not name.endswith("attn_sink"):
        return 1 + 0.1 * normal  # norm weights
    if name.endswith(("engram.q_weight", "engram.k_weight")):
        return 1 + 0.1 * normal
    if normal.ndim == 2 and name != "embed.weight":
        return normal / normal.shape[-1] ** 0.5
    return normal


def _shard_of(name: str, config: ModelConfig, n_shards: int) -> int:
    if ".engram." in name or (is_skipped(name) and not name.startswith("layers.")):
        return n_shards - 1
    n_layer_shards = max(1, n_shards - 1)
    if not name.startswith("layers."):
        return 0 if name == "embed.weight" else n_layer_shards - 1
    return int(name.split(".")[1]) * n_layer_shards // config.n_layers


def _write_parts(path: Path, header: bytes, data: bytes) -> None:
    header += b" " * (-len(header) % LENGTH_BYTES)
    path.write_bytes(len(header).to_bytes(LENGTH_BYTES, "little") + header + data)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1))
