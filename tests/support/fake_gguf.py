"""A minimal GGUF writer of our own, and whole fake models of the deepseek41 architecture.

`write_gguf` writes what it is told, right or wrong; `write_fake_gguf` writes every tensor that a
config asks for, in the types that a function chooses, from a seed. numpy only.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from protocol.files.block_sizes import BLOCK_TYPE_OF_ID, BLOCK_TYPE_OF_NAME
from protocol.files.config_rules import engram_column_rows
from protocol.files.engram_multipliers import engram_multipliers
from protocol.files.gguf_names import gguf_names
from protocol.files.gguf_table import ROW_ENCODING, ROW_ENCODING_KEY, gguf_shapes
from protocol.files.model_config import ModelConfig

# Sizes of a config with which rows of every matrix are whole blocks of 256, the Engram tables' too.
WIDE = {
    "q_lora_rank": 256,
    "head_dim": 256,
    "o_lora_rank": 128,
    "engram_head_dim": 256,
    "num_nextn_predict_layers": 0,
    "compress_ratios": [0, 0, 2, 2, 2, 1],
}
FORMATS = {
    "u8": (0, "<B"), "i8": (1, "<b"), "u16": (2, "<H"), "i16": (3, "<h"), "u32": (4, "<I"),
    "i32": (5, "<i"), "f32": (6, "<f"), "bool": (7, "<?"), "u64": (10, "<Q"), "i64": (11, "<q"),
    "f64": (12, "<d"),
}  # fmt: skip
# Where each block has its float16 fields; random bytes there could be infinite.
F16_FIELDS = {
    "F16": (0,), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "IQ2_XXS": (0,),
}  # fmt: skip


class Typed(NamedTuple):
    """A metadata value: kind is one of FORMATS, "string", or either behind "array:"."""

    kind: str
    value: Any


class FakeTensor(NamedTuple):
    """A tensor as it stands in a file; `offset` overrides the place that the writer chooses."""

    name: str
    dims: tuple[int, ...]
    type_id: int
    data: bytes
    offset: int | None = None


def string(text: str | bytes) -> bytes:
    """Return a GGUF string."""
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value_bytes(typed: Typed) -> bytes:
    """Return a value with its type in front."""
    kind, value = typed
    if kind == "string":
        return struct.pack("<I", 8) + string(value)
    if kind.startswith("array:"):
        inner = kind.removeprefix("array:")
        if inner == "string":
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(string, value))
        type_id, code = FORMATS[inner]
        items = np.asarray(value, np.dtype(code)).tobytes()
        return struct.pack("<IIQ", 9, type_id, len(value)) + items
    type_id, code = FORMATS[kind]
    return struct.pack("<I", type_id) + struct.pack(code, value)


def gguf_bytes(
    metadata: Iterable[tuple[str, Typed]],
    tensors: Sequence[FakeTensor],
    *,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """Return a whole file; the caller states `general.alignment` where it is not 32."""
    pairs = list(metadata)
    head = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(pairs))]
    head += [string(key) + value_bytes(value) for key, value in pairs]
    data = bytearray()
    for name, dims, type_id, payload, offset in tensors:
        data += bytes(-len(data) % alignment)
        at = len(data) if offset is None else offset
        head.append(string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
        head.append(struct.pack("<IQ", type_id, at))
        data += payload
    header = b"".join(head)
    return header + bytes(-len(header) % alignment) + bytes(data)


def write_gguf(
    path: Path,
    metadata: Mapping[str, Typed],
    tensors: Sequence[FakeTensor],
    *,
    version: int = 3,
    alignment: int = 32,
) -> Path:
    """Write one file and return its path."""
    pairs = dict(metadata)
    if alignment != 32:
        pairs["general.alignment"] = Typed("u32", alignment)
    path.write_bytes(gguf_bytes(pairs.items(), tensors, version=version, alignment=alignment))
    return path


def write_split(
    directory: Path, stem: str, metadata: Mapping[str, Typed], parts: Sequence[Sequence[FakeTensor]]
) -> list[Path]:
    """Write a split set; the first part has the metadata."""
    n_tensors = sum(map(len, parts))
    paths = []
    for number, part in enumerate(parts):
        pairs = dict(metadata) if number == 0 else {}
        pairs["split.no"] = Typed("u16", number)
        pairs["split.count"] = Typed("u16", len(parts))
        pairs["split.tensors.count"] = Typed("i32", n_tensors)
        path = directory / f"{stem}-{number + 1:05d}-of-{len(parts):05d}.gguf"
        paths.append(write_gguf(path, pairs, part))
    return paths


def fake_metadata(
    config: ModelConfig,
    *,
    token_map: Sequence[int] | None = None,
    tokens: Sequence[str] | None = None,
) -> dict[str, Typed]:
    """Return the metadata of a model; the token map is `id // 2` unless given.

    So it is for the tokens, the words of the official fake's tokenizer, unless others are given.
    """
    multipliers = engram_multipliers(config)
    mapped = [i // 2 for i in range(config.vocab_size)] if token_map is None else token_map
    if tokens is None:
        tokens = [f"{'wW'[i % 2]}{i // 2}" for i in range(config.vocab_size)]
    primes = engram_column_rows(config)
    offsets = [list(accumulate(row, initial=0))[:-1] for row in primes]
    u32 = {
        "block_count": config.n_layers,
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.n_heads,
        "attention.key_length": config.head_dim,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.output_lora_rank": config.o_lora_rank,
        "attention.output_group_count": config.o_groups,
        "attention.sliding_window": config.sliding_window,
        "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim,
        "attention.indexer.top_k": config.index_top_k,
        "attention.indexer.candidate_top_blocks": config.candidate_top_blocks,
        "attention.indexer.candidate_block_size": config.candidate_block_size,
        "rope.dimension_count": config.rope_head_dim,
        "rope.scaling.original_context_length": config.rope_original_length,
        "expert_count": config.n_experts,
        "expert_used_count": config.top_k,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.expert_width,
        "hyper_connection.count": config.hc_mult,
        "hyper_connection.sinkhorn_iterations": config.hc_sinkhorn_iters,
        "engram.head_count": config.engram_n_heads,
        "engram.key_length": config.engram_head_dim,
        "engram.max_ngram_size": config.engram_max_ngram,
        "engram.vocab_size": config.engram_first_prime,
        "engram.pad_id": mapped[config.pad_id],
    }
    f32 = {
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "expert_weights_scale": config.routed_scale,
        "swiglu_limit": config.swiglu_limit,
        "hyper_connection.epsilon": config.hc_eps,
        "rope.freq_base": config.rope_theta,
        "attention.compress_rope_freq_base": config.compress_rope_theta,
        "rope.scaling.factor": config.rope_factor,
        "rope.scaling.yarn_beta_fast": config.rope_beta_fast,
        "rope.scaling.yarn_beta_slow": config.rope_beta_slow,
    }
    arrays = {
        "attention.compress_ratios": Typed("array:u32", config.compress_ratios),
        "engram.layer_ids": Typed("array:i32", config.engram_layers),
        "engram.multipliers": Typed("array:i64", [m for row in multipliers for m in row]),
        "engram.primes": Typed("array:u64", [p for row in primes for p in row]),
        "engram.offsets": Typed("array:u64", [o for row in offsets for o in row]),
        "engram.token_map": Typed("array:u32", mapped),
    }
    plain = {key: Typed("u32", value) for key, value in u32.items()}
    plain |= {key: Typed("f32", value) for key, value in f32.items()}
    return {
        "general.architecture": Typed("string", "deepseek41"),
        **{f"deepseek41.{key}": value for key, value in (plain | arrays).items()},
        "deepseek41.rope.scaling.type": Typed("string", "yarn"),
        "deepseek41.image_token_id": Typed("u32", config.image_id),
        "tokenizer.ggml.model": Typed("string", "gpt2"),
        "tokenizer.ggml.pre": Typed("string", "deepseek-v3"),
        "tokenizer.ggml.tokens": Typed("array:string", tokens),
        "tokenizer.ggml.token_type": Typed("array:i32", [1] * len(tokens)),
        "tokenizer.ggml.merges": Typed("array:string", []),
        "tokenizer.ggml.bos_token_id": Typed("u32", config.bos_id),
        "tokenizer.ggml.eos_token_id": Typed("u32", config.eos_id),
        "tokenizer.ggml.padding_token_id": Typed("u32", config.pad_id),
    }


def fake_types(name: str, shape: tuple[int, ...]) -> str:
    """The types of the mixed Q2_K file, where the rows are long enough for them."""
    if len(shape) == 1 or ".hc_" in name or name.endswith(("q_weight", "k_weight")):
        return "F32"
    if shape[-1] % 256 == 0:
        return "Q3_K" if ".w2." in name else "Q6_K" if name.startswith("head") else "Q2_K"
    return "Q8_0" if shape[-1] % 32 == 0 else "BF16"


def random_blocks(kind: str, n_values: int, seed: int) -> bytes:
    """Return blocks of random codes whose scales are small numbers."""
    block = BLOCK_TYPE_OF_NAME[kind]
    generator = np.random.default_rng(seed)
    if kind in ("F32", "BF16"):
        values = (0.1 * generator.normal(size=n_values)).astype(np.float32).view(np.uint32)
        return values.tobytes() if kind == "F32" else (values >> 16).astype(np.uint16).tobytes()
    blocks = generator.integers(0, 256, (n_values // block.n_values, block.n_bytes), dtype=np.uint8)
    for field in F16_FIELDS.get(kind, ()):
        blocks[:, field + 1] = 0x10 + (blocks[:, field + 1] & 3)
    if kind == "MXFP4":
        blocks[:, 0] = 118 + (blocks[:, 0] & 7)
    return blocks.tobytes()


def fake_gguf_tensors(
    config: ModelConfig,
    seed: int = 0,
    types: Callable[[str, tuple[int, ...]], str] = fake_types,
    *,
    ds4: bool = False,
) -> list[FakeTensor]:
    """Return every tensor of a model; `ds4` takes DS4's spellings and its I8 Engram rows."""
    tensors = []
    for name, shape in gguf_shapes(config).items():
        spelling = gguf_names(name)[-1 if ds4 else 0]
        kind = types(name, shape)
        if ds4 and name.endswith("engram.embed.weight"):
            tensors.append(_row_table(spelling, shape[0], config, seed))
            continue
        data = random_blocks(kind, prod(shape), zlib.crc32(name.encode(), seed))
        tensors.append(FakeTensor(spelling, shape[::-1], BLOCK_TYPE_OF_NAME[kind].type_id, data))
    # DS4 places the tables last.
    return sorted(tensors, key=lambda tensor: "engram_embd" in tensor.name)


def write_fake_gguf(
    path: Path,
    config: ModelConfig,
    *,
    seed: int = 0,
    types: Callable[[str, tuple[int, ...]], str] = fake_types,
    ds4: bool = False,
    n_parts: int = 1,
    more: Mapping[str, Typed] | None = None,
) -> Path:
    """Write a whole model as one file, or as a split set beside it; return the first file.

    `more` adds metadata, or replaces some.
    """
    metadata = fake_metadata(config) | dict(more or {})
    if ds4:
        metadata[ROW_ENCODING_KEY] = Typed("string", ROW_ENCODING)
    tensors = fake_gguf_tensors(config, seed, types, ds4=ds4)
    if n_parts == 1:
        return write_gguf(path, metadata, tensors)
    size = -(-len(tensors) // n_parts)
    parts = [tensors[start : start + size] for start in range(0, len(tensors), size)]
    return write_split(path.parent, path.stem, metadata, parts)[0]


def tensor_size(dims: Sequence[int], type_id: int) -> int:
    """Return the bytes that a tensor of these dims has."""
    block = BLOCK_TYPE_OF_ID[type_id]
    return prod(dims) // block.n_values * block.n_bytes


def _row_table(spelling: str, n_rows: int, config: ModelConfig, seed: int) -> FakeTensor:
    generator = np.random.default_rng(zlib.crc32(spelling.encode(), seed))
    rows = generator.integers(0, 256, (n_rows, config.engram_row_bytes), dtype=np.uint8)
    values, scales = rows[:, : config.engram_head_dim], rows[:, config.engram_head_dim :]
    values[(values & 0x7F) == 0x7F] = 0x30  # no NaN
    scales[:] = 110 + (scales & 15)
    return FakeTensor(spelling, rows.shape[::-1], BLOCK_TYPE_OF_NAME["I8"].type_id, rows.tobytes())
