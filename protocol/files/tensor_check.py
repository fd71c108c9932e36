"""Tensors that were found against tensors that a model has to have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from protocol.errors import ShardError

from .model_config import CONFIG_NAME
from .safetensors_header import TensorEntry
from .tensor_table import ExpectedTensor, is_skipped, tensor_label


def check_tensors(
    directory: Path, tensors: Mapping[str, TensorEntry], expected: Mapping[str, ExpectedTensor]
) -> None:
    """Raise ShardError on a missing tensor, another dtype or shape, and one that is not known."""
    for name, wanted in expected.items():
        entry = tensors.get(name)
        if entry is None:
            raise ShardError(
                f"{directory}: {tensor_label(name)} is in no shard, "
                f"wanted {wanted.dtype} {list(wanted.shape)}"
            )
        if entry.dtype != wanted.dtype or entry.shape != wanted.shape:
            raise ShardError(
                f"{entry.shard.path}: {tensor_label(name)} is {entry.dtype} {list(entry.shape)}, "
                f"wanted {wanted.dtype} {list(wanted.shape)}"
            )
    for name, entry in tensors.items():
        if name not in expected and not is_skipped(name):
            raise ShardError(
                f"{entry.shard.path}: {tensor_label(name)} is no part of the model that "
                f"{CONFIG_NAME} describes"
            )
