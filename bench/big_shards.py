"""A checkpoint with experts and Engram rows of the released sizes, of random bytes, for benches.

Of each byte only the bits of NUMBERS are kept: then it is no part of a NaN or an infinity of any
dtype, and what is written can be packed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from protocol.files.model_config import parse_model_config
from protocol.files.safetensors_header import dtype_bytes
from protocol.files.safetensors_index import load_index
from protocol.files.tensor_table import ExpectedTensor, expected_tensors
from tests.support.fake_checkpoint import FILE_ORDER, fake_config, word_tokenizer, write_index

HIDDEN, WIDTH = 5120, 2304  # of the released model: 18,800,640 bytes an expert
ROW_VALUES = 256  # and 264 bytes an Engram row
VOCAB = 64
BLOCK_BYTES = 64 << 20
NUMBERS = 0x77


def write_big_checkpoint(
    directory: Path, *, n_layers: int, n_experts: int, top_k: int, rows_per_column: int
) -> Path:
    """Write a model directory with two Engram tables of 6 columns and drop its pages."""
    text = {
        "engram_layer_ids": [1, 2],
        "engram_head_dim": ROW_VALUES,
        "engram_vocab_size": rows_per_column,
    }
    raw = fake_config(
        n_layers=n_layers,
        n_experts=n_experts,
        top_k=top_k,
        hidden_size=HIDDEN,
        expert_width=WIDTH,
        vocab_size=VOCAB,
        text_config=text,
    )
    directory.mkdir(parents=True)
    write: dict[str, Any] = {"config.json": raw, "tokenizer.json": word_tokenizer(VOCAB)}
    write["engram_token_map.json"] = [token // 2 for token in range(VOCAB)]
    for name, value in write.items():
        (directory / name).write_text(json.dumps(value))
    shards: dict[str, dict[str, ExpectedTensor]] = {}
    for name, tensor in expected_tensors(parse_model_config(raw, "bench")).items():
        layer = name.split(".")[1] if tensor.kind == "expert" else tensor.kind
        shards.setdefault(f"model-{layer}.safetensors", {})[name] = tensor
    for file_name, tensors in shards.items():
        _write_shard(directory / file_name, tensors)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    write_index(
        directory, weight_map, sum(_n_bytes(t) for s in shards.values() for t in s.values())
    )
    return directory


def tame_scales(directory: Path) -> None:
    """Set every E8M0 scale to 2^-9, so that what is computed from the weights stays finite."""
    for entry in load_index(directory).tensors.values():
        if entry.dtype == "F8_E8M0":
            with entry.shard.path.open("r+b") as file:
                file.seek(entry.offset)
                file.write(bytes([118]) * entry.n_bytes)
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _n_bytes(tensor: ExpectedTensor) -> int:
    return dtype_bytes(tensor.dtype, tensor.shape)


def _write_shard(path: Path, tensors: Mapping[str, ExpectedTensor]) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (FILE_ORDER.index(tensors[name].dtype), name)):
        tensor = tensors[name]
        begin, end = end, end + _n_bytes(tensor)
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.Generator(np.random.SFC64(1))
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for begin in range(0, end, BLOCK_BYTES):
            block = np.frombuffer(random.bytes(min(BLOCK_BYTES, end - begin)), np.uint8)
            file.write((block & NUMBERS).data)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
