"""Tests of protocol/files/tensor_table.py."""

from __future__ import annotations

import math
from collections import Counter

from protocol.files.model_config import parse_model_config
from protocol.files.safetensors_index import dtype_bytes
from protocol.files.tensor_table import (
    dense_tensors,
    engram_tensors,
    expected_tensors,
    expert_key,
    expert_tensors,
    is_skipped,
    tensor_label,
)
from tests.support.released_config import (
    RELEASED_BYTES,
    RELEASED_EXPERT_BYTES,
    RELEASED_KEYS,
    released_config,
    released_skipped_tensors,
)

CONFIG = parse_model_config(released_config(), "released")


def test_released_files_have_the_published_number_of_keys_and_bytes() -> None:
    tensors = expected_tensors(CONFIG) | released_skipped_tensors(CONFIG)
    assert len(tensors) == RELEASED_KEYS
    assert sum(dtype_bytes(t.dtype, t.shape) for t in tensors.values()) == RELEASED_BYTES


def test_released_files_have_the_published_parameters_of_each_dtype() -> None:
    counts: Counter[str] = Counter()
    for tensor in (expected_tensors(CONFIG) | released_skipped_tensors(CONFIG)).values():
        counts[tensor.dtype] += math.prod(tensor.shape)
    assert counts["BF16"] == 1_976_441_856
    assert counts["F32"] == 42_307_282
    assert counts["F8_E4M3"] == 204_015_223_296
    assert counts["I8"] * 2 == 557_171_343_360


def test_one_released_expert_has_the_published_bytes() -> None:
    experts = expert_tensors(CONFIG)
    first = [tensor for name, tensor in experts.items() if expert_key(name) == (0, 0)]
    assert len(first) == 6
    assert sum(dtype_bytes(t.dtype, t.shape) for t in first) == RELEASED_EXPERT_BYTES


def test_only_sources_own_compressor_and_indexer() -> None:
    dense = dense_tensors(CONFIG)

    def owners(suffix: str) -> list[int]:
        return [n for n in range(40) if f"layers.{n}.attn.{suffix}" in dense]

    assert owners("compressor.wkv.weight") == [2, 8, 14, 20]
    assert owners("compressor.wgate.weight") == [2, 8, 14]
    assert owners("indexer.wk.weight") == [2, 8, 14, 20]
    assert owners("indexer.wq_b.scale") == [2, 8, 14, 20, 24, 28, 32, 36]


def test_the_kinds_divide_the_tensors() -> None:
    assert {tensor.kind for tensor in dense_tensors(CONFIG).values()} == {"dense"}
    assert {tensor.kind for tensor in expert_tensors(CONFIG).values()} == {"expert"}
    assert {tensor.kind for tensor in engram_tensors(CONFIG).values()} == {"engram"}
    assert "layers.1.engram.wkv.weight" in dense_tensors(CONFIG)
    assert list(engram_tensors(CONFIG)) == [
        "layers.1.engram.embed.weight",
        "layers.1.engram.embed.scale",
        "layers.14.engram.embed.weight",
        "layers.14.engram.embed.scale",
    ]


def test_skipped_names_are_recognised_and_no_other() -> None:
    assert all(is_skipped(name) for name in released_skipped_tensors(CONFIG))
    assert not any(is_skipped(name) for name in expected_tensors(CONFIG))
    assert not is_skipped("layers.0.attn.bias_vl")


def test_an_expert_is_named_with_layer_and_expert() -> None:
    assert expert_key("layers.7.ffn.experts.212.w1.scale") == (7, 212)
    assert expert_key("mtp.0.ffn.experts.1.w1.scale") is None
    assert expert_key("layers.7.ffn.shared_experts.w1.scale") is None
    label = tensor_label("layers.7.ffn.experts.212.w1.scale")
    assert label == "layer 7 expert 212: tensor 'layers.7.ffn.experts.212.w1.scale'"
    assert len(tensor_label("x" * 10_000)) < 300
