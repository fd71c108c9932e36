"""The released checkpoint without its bytes: 48 shards of headers and holes, 93,378 tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from protocol.files.model_config import parse_model_config
from protocol.files.safetensors_header import dtype_bytes
from protocol.files.tensor_table import expected_tensors

from .fake_checkpoint import write_index
from .released_config import released_config

N_SHARDS = 48


def write_released_checkpoint(
    directory: Path, edit: Callable[[list[dict[str, Any]]], None] | None = None
) -> Path:
    """Write the directory; `edit` may change the shards' tensors, name -> (dtype, shape)."""
    directory.mkdir(parents=True)
    raw = released_config()
    (directory / "config.json").write_text(json.dumps(raw))
    tensors = expected_tensors(parse_model_config(raw, "test"))
    tables = [name for name in tensors if tensors[name].kind == "engram"]
    rest = [name for name in tensors if tensors[name].kind != "engram"]
    n_each = -(-len(rest) // (N_SHARDS - 1))
    groups = [rest[at : at + n_each] for at in range(0, len(rest), n_each)] + [tables]
    shards = [{name: (tensors[name].dtype, tensors[name].shape) for name in g} for g in groups]
    if edit is not None:
        edit(shards)
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05d}-of-{N_SHARDS:05d}.safetensors"
        total += _write_sparse(directory / file_name, shard)
        weight_map |= dict.fromkeys(shard, file_name)
    write_index(directory, weight_map, total)
    return directory


def _write_sparse(path: Path, tensors: dict[str, Any]) -> int:
    """Write a header with a hole behind it; return the bytes of the hole."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + dtype_bytes(dtype, tuple(shape))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)
    return end
