"""A GGUF's metadata and tensors as a checked ModelConfig."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol.errors import ConfigError, ShardError
from protocol.files.block_sizes import BLOCK_TYPE_OF_NAME
from protocol.files.engram_multipliers import engram_multipliers
from protocol.files.gguf_config import IMAGE_TEXT, GgufModel, read_gguf_config
from protocol.files.gguf_index import load_gguf
from protocol.files.gguf_names import gguf_names
from protocol.files.gguf_table import ROW_ENCODING_KEY, checked_tensors, gguf_shapes
from protocol.files.model_config import ModelConfig, parse_model_config
from tests.support.fake_checkpoint import fake_config
from tests.support.fake_gguf import (
    FakeTensor,
    Typed,
    fake_gguf_tensors,
    fake_metadata,
    fake_types,
    gguf_bytes,
    write_fake_gguf,
    write_gguf,
)
from tests.support.released_config import released_config


def config_of(**text: Any) -> ModelConfig:
    config = parse_model_config(fake_config(text_config=text), "fake")
    return replace(config, n_draft_stages=0)


CONFIG = config_of()
MULTIPLIERS = engram_multipliers(CONFIG)  # above 2^53
FLAT = [number for row in MULTIPLIERS for number in row]


def written(
    tmp_path: Path, changes: Mapping[str, Typed | None], config: ModelConfig = CONFIG
) -> Path:
    """A model whose metadata are changed; None takes a key away."""
    metadata = fake_metadata(config)
    prefixed = {
        key[1:] if key.startswith(".") else f"deepseek41.{key}": value
        for key, value in changes.items()
    }
    kept = {key: value for key, value in (metadata | prefixed).items() if value is not None}
    return write_gguf(tmp_path / "m.gguf", kept, fake_gguf_tensors(config))


def read(tmp_path: Path, changes: Mapping[str, Typed | None]) -> GgufModel:
    return read_gguf_config(load_gguf(written(tmp_path, changes)))


@pytest.mark.parametrize("ds4", [False, True])
@pytest.mark.parametrize("n_parts", [1, 3])
def test_the_config_of_a_gguf_equals_the_official_one(tmp_path, ds4, n_parts):
    path = write_fake_gguf(tmp_path / "m.gguf", CONFIG, ds4=ds4, n_parts=n_parts)
    index = load_gguf(path)
    model = read_gguf_config(index)
    assert model.config == CONFIG
    assert model.engram.multipliers == MULTIPLIERS
    assert model.engram.token_map is not None
    assert model.engram.token_map.tolist() == [i // 2 for i in range(CONFIG.vocab_size)]
    assert model.engram.pad == 1
    assert model.defaulted == ()
    assert set(checked_tensors(CONFIG, index)) == set(gguf_shapes(CONFIG))


def released_bytes(tmp_path: Path, config: ModelConfig) -> Path:
    """The released model's header over a sparse file: every tensor, no data."""
    tensors, end = [], 0
    for tensor in fake_headers(config):
        tensors.append(tensor[0]._replace(offset=end))
        end += -(-tensor[1] // 32) * 32
    metadata = fake_metadata(
        config,
        token_map=[i % config.engram_compressed_vocab for i in range(config.vocab_size)],
    )
    dropped = ("candidate", "image_token", "compress_rope", "engram.vocab_size", "ggml.tokens")
    pairs = [
        (key, value) for key, value in metadata.items() if not any(part in key for part in dropped)
    ]
    path = tmp_path / "released.gguf"
    path.write_bytes(gguf_bytes(pairs, tensors))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + end)
    return path


def fake_headers(config: ModelConfig) -> list[tuple[FakeTensor, int]]:
    headers = []
    for name, shape in gguf_shapes(config).items():
        block = BLOCK_TYPE_OF_NAME[fake_types(name, shape)]
        n_bytes = prod(shape) // block.n_values * block.n_bytes
        tensor = FakeTensor(gguf_names(name)[0], shape[::-1], block.type_id, b"")
        headers.append((tensor, n_bytes))
    return headers


def test_the_released_models_header_gives_the_released_config(tmp_path):
    wanted = replace(parse_model_config(released_config(), "released"), n_draft_stages=0)
    index = load_gguf(released_bytes(tmp_path, wanted))
    model = read_gguf_config(index)
    # The prime search may start anywhere up to the first prime: the primes are the same.
    assert model.config == replace(wanted, engram_first_prime=16_000_057)
    assert set(model.defaulted) == {
        "deepseek41.attention.compress_rope_freq_base",
        "deepseek41.attention.indexer.candidate_block_size",
        "deepseek41.attention.indexer.candidate_top_blocks",
        "deepseek41.engram.vocab_size",
        "deepseek41.image_token_id",
    }
    tensors = checked_tensors(wanted, index)
    gate = tensors["layers.7.ffn.experts.*.w1.weight"]
    assert (gate.block.name, gate.n_bytes // 384) == ("Q2_K", 3_870_720)
    down = tensors["layers.7.ffn.experts.*.w2.weight"]
    assert (down.block.name, down.n_bytes // 384) == ("Q3_K", 5_068_800)
    assert tensors["layers.1.engram.embed.weight"].row_bytes == 84


def test_the_image_token_is_found_by_its_text(tmp_path):
    tokens = [f"t{i}" for i in range(CONFIG.vocab_size)]
    tokens[CONFIG.image_id] = IMAGE_TEXT
    changes = {"image_token_id": None, ".tokenizer.ggml.tokens": Typed("array:string", tokens)}
    assert read(tmp_path, changes).config == CONFIG


def test_sources_come_from_the_presence_of_tensors(tmp_path):
    config = read(tmp_path, {}).config
    assert config.kv_source_layers == (2, 4, 5)
    assert config.index_source_layers == (2, 4, 5, 7)
    assert config.candidate_source_layer == 5
    with_drafts = [*CONFIG.compress_ratios, 0, 0, 0]
    changes = {
        "attention.compress_ratios": Typed("array:i32", with_drafts),
        "block_count": Typed("u32", CONFIG.n_layers + 3),
        "nextn_predict_layers": Typed("u32", 3),
    }
    assert read(tmp_path, changes).config == CONFIG


def test_window_layers_may_have_the_rotary_base_of_their_own_key(tmp_path):
    changes = {
        "rope.freq_base": Typed("f32", 160000.0),
        "rope.freq_base_swa": Typed("f32", 10000.0),
        "attention.compress_rope_freq_base": None,
    }
    assert read(tmp_path, changes).config == CONFIG


def test_a_float32_becomes_the_decimal_that_was_meant(tmp_path):
    config = read(tmp_path, {"hyper_connection.epsilon": Typed("f32", 1e-6)}).config
    assert config.hc_eps == 1e-6
    assert config.norm_eps == 1e-20
    config = read(tmp_path, {"hyper_connection.epsilon": Typed("f64", 1.00000000001e-6)}).config
    assert config.hc_eps == 1.00000000001e-6


def test_per_layer_lists_of_one_value_are_that_value(tmp_path):
    changes = {
        "attention.head_count": Typed("array:u32", [2] * 8),
        "swiglu_limit": None,
        "swiglu_clamp_exp": Typed("array:f32", [10.0] * 8),
    }
    assert read(tmp_path, changes).config == CONFIG
    with pytest.raises(ConfigError, match=r"attention\.head_count is .*one value for all layers"):
        read(tmp_path, {"attention.head_count": Typed("array:u32", [2, 4])})


@pytest.mark.parametrize("kind", ["array:i64", "array:u64", "array:string"])
def test_multipliers_keep_all_64_bits(tmp_path, kind):
    assert any(int(float(number)) != number for number in FLAT)
    stored = [str(number) for number in FLAT] if kind == "array:string" else FLAT
    engram = read(tmp_path, {"engram.multipliers": Typed(kind, stored)}).engram
    assert engram.multipliers == MULTIPLIERS


def test_multipliers_that_the_rule_does_not_give_are_refused_with_both(tmp_path):
    doubles = [int(float(number)) for number in FLAT]
    other = [*FLAT[:-1], FLAT[-1] + 2]
    for flat, layer in ((doubles, 1), (other, 4)):
        with pytest.raises(ConfigError) as caught:
            read(tmp_path, {"engram.multipliers": Typed("array:u64", flat)})
        row = CONFIG.engram_layers.index(layer)
        assert f"for layer {layer}, wanted {list(MULTIPLIERS[row])}" in str(caught.value)
        assert str(flat[4 * row : 4 * row + 4]) in str(caught.value)


def test_the_pad_may_be_the_tokens_own_id_or_its_compressed_one(tmp_path):
    for said in (2, 1):
        model = read(tmp_path, {"engram.pad_id": Typed("u32", said)})
        assert (model.config.engram_pad_id, model.engram.pad) == (2, 1)
    with pytest.raises(ConfigError, match=r"engram\.pad_id is 7, wanted 2, or 1, the compressed"):
        read(tmp_path, {"engram.pad_id": Typed("u32", 7)})


def test_what_the_file_lacks_is_listed(tmp_path):
    changes = {"engram.multipliers": None, "engram.offsets": None, "rope.scaling.factor": None}
    model = read(tmp_path, changes)
    assert set(model.defaulted) == {f"deepseek41.{key}" for key in changes}
    assert model.engram.multipliers == ()
    assert model.config.rope_factor == 16


def array_u32(*numbers: int) -> Typed:
    return Typed("array:u32", numbers)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({".general.architecture": Typed("string", "deepseek4")}, "architecture is 'deepseek4'"),
        ({".general.architecture": None}, "architecture is None, wanted 'deepseek41'"),
        ({"embedding_length": None}, "deepseek41.embedding_length is missing, wanted an integer"),
        ({"embedding_length": Typed("f32", 64)}, "embedding_length is 64.0, wanted an integer"),
        ({"embedding_length": Typed("bool", True)}, "embedding_length is True"),
        ({"embedding_length": Typed("u32", 65)}, "hidden_size is 65"),
        ({"expert_weights_scale": Typed("string", "1.5")}, "expert_weights_scale is '1.5'"),
        ({"expert_weights_scale": Typed("f32", np.nan)}, "routed_scaling_factor"),
        ({"block_count": Typed("u32", 9)}, "block_count is 9, wanted 8, the number of layers"),
        ({"attention.compress_ratios": None}, "compress_ratios is missing, wanted 8 integers"),
        ({"attention.compress_ratios": array_u32(0, 0)}, "wanted 8 integers"),
        ({"attention.compress_ratios": Typed("array:f32", [0.0] * 8)}, "holds f32, wanted integ"),
        ({"attention.compress_ratios": Typed("u32", 2)}, "compress_ratios is 2, wanted an array"),
        ({"rope.scaling.type": Typed("string", "linear")}, "rope_type is 'linear'"),
        ({"engram.layer_ids": array_u32(1)}, "layer_ids is an array of 1 u32, wanted [1, 4]"),
        ({"engram.layer_ids": array_u32(1, 5)}, "wanted [1, 4], the layers with a table"),
        ({"engram.multipliers": Typed("array:i64", [1, 3, 5])}, "wanted 2 x 4 integers below 2^63"),
        ({"engram.multipliers": Typed("array:i64", [-1] * 8)}, "wanted 2 x 4 integers below 2^63"),
        ({"engram.multipliers": Typed("array:u64", [1 << 63] * 8)}, "below 2^63"),
        ({"engram.multipliers": Typed("array:i64", [3] * 8)}, "are [3, 3, 3, 3] for layer 1, want"),
        ({"engram.multipliers": Typed("array:f64", [1.0] * 8)}, "holds f64, wanted integers"),
        ({"engram.multipliers": Typed("array:string", ["x"] * 8)}, "wanted a list of integers"),
        ({"engram.primes": Typed("array:u64", [23] * 12)}, "engram"),
        (
            {"engram.offsets": Typed("array:u64", [0] * 12)},
            "offsets is an array of 12 u64, wanted the sums",
        ),
        ({"engram.token_map": array_u32(*range(63))}, "token_map"),
        ({"engram.token_map": array_u32(*range(1, 65))}, "wanted 64 integers from 0 to 63"),
        (
            {"image_token_id": None, ".tokenizer.ggml.tokens": None},
            "tokenizer.ggml.tokens is missing, wanted a list with",
        ),
        ({"image_token_id": None}, "for no other key has its id"),
    ],
)
def test_metadata_that_cannot_be_meant_are_refused_by_name(tmp_path, changes, says):
    with pytest.raises((ConfigError, ShardError)) as caught:
        read(tmp_path, changes)
    assert says in str(caught.value)
    assert str(tmp_path / "m.gguf") in str(caught.value)


def test_a_missing_embedding_is_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", fake_metadata(CONFIG), [])
    with pytest.raises(ConfigError, match="block_count"):
        read_gguf_config(load_gguf(path))
    tensors = [tensor for tensor in fake_gguf_tensors(CONFIG) if tensor.name != "token_embd.weight"]
    write_gguf(path, fake_metadata(CONFIG), tensors)
    with pytest.raises(ConfigError, match=r"token_embd\.weight"):
        read_gguf_config(load_gguf(path))


def checked(tmp_path: Path, tensors: list[FakeTensor], **metadata: Typed) -> None:
    pairs = fake_metadata(CONFIG)
    path = write_gguf(tmp_path / "m.gguf", pairs | metadata, tensors)
    checked_tensors(CONFIG, load_gguf(path))


def replaced(name: str, *new: FakeTensor, ds4: bool = False) -> list[FakeTensor]:
    return [t for t in fake_gguf_tensors(CONFIG, ds4=ds4) if t.name != name] + list(new)


def test_tensors_that_are_not_the_models_are_refused_by_name(tmp_path):
    name = "blk.3.attn_q_a.weight"
    with pytest.raises(ShardError, match=r"'blk\.3\.attn_q_a\.weight' is in no file"):
        checked(tmp_path, replaced(name))
    with pytest.raises(ShardError, match=r"'blk\.1\.engram_wkv\.weight' or 'blk\.1\.engram_kv"):
        checked(tmp_path, replaced("blk.1.engram_wkv.weight"))
    with pytest.raises(ShardError, match=r"has the dims \[64, 33\] \(F32\), wanted \[64, 32\]"):
        checked(tmp_path, replaced(name, FakeTensor(name, (64, 33), 0, bytes(64 * 33 * 4))))
    with pytest.raises(ShardError, match="has the type Q4_0, wanted one of BF16"):
        checked(tmp_path, replaced(name, FakeTensor(name, (64, 32), 2, bytes(64 * 18))))
    odd = FakeTensor("blk.3.attn_extra.weight", (1,), 0, bytes(4))
    with pytest.raises(ShardError, match=r"'blk\.3\.attn_extra\.weight' is no part of the model"):
        checked(tmp_path, [*fake_gguf_tensors(CONFIG), odd])
    spare = FakeTensor("blk.3.exp_probs_b_vl.bias", (8,), 0, bytes(32))
    checked(tmp_path, [*fake_gguf_tensors(CONFIG), spare])


def test_highway_and_engram_query_weights_stay_unquantised(tmp_path):
    name = "blk.3.hc_attn_fn.weight"
    tensor = FakeTensor(name, (256, 24), 10, bytes(24 * 84))
    with pytest.raises(ShardError, match="has the type Q2_K, wanted F32, F16 or BF16"):
        checked(tmp_path, replaced(name, tensor))
    name = "blk.1.engram_q.weight"
    tensor = FakeTensor(name, (64, 4), 8, bytes(8 * 34))
    with pytest.raises(ShardError, match="has the type Q8_0, wanted F32, F16 or BF16"):
        checked(tmp_path, replaced(name, tensor))


def test_the_first_output_matrix_may_have_its_groups_apart(tmp_path):
    name = "blk.3.attn_output_a.weight"
    dims = (CONFIG.n_heads * CONFIG.head_dim // CONFIG.o_groups, CONFIG.o_lora_rank)
    data = bytes(4 * dims[0] * dims[1] * CONFIG.o_groups)
    checked(tmp_path, replaced(name, FakeTensor(name, (*dims, CONFIG.o_groups), 0, data)))


def test_official_engram_rows_need_their_encoding_key(tmp_path):
    tensors = fake_gguf_tensors(CONFIG, ds4=True)
    with pytest.raises(ShardError, match=r"is I8, but deepseek41\.engram\.encoding is None"):
        checked(tmp_path, tensors)
    with pytest.raises(ShardError, match="encoding is 'other'"):
        checked(tmp_path, tensors, **{ROW_ENCODING_KEY: Typed("string", "other")})
    name = "blk.1.engram_embd.weight"
    short = FakeTensor(name, (32, CONFIG.engram_n_rows[0]), 24, bytes(32 * CONFIG.engram_n_rows[0]))
    good = {ROW_ENCODING_KEY: Typed("string", "e4m3_e8m0_32_row264")}
    with pytest.raises(ShardError, match=r"has the dims \[32, "):
        checked(tmp_path, replaced(name, short, ds4=True), **good)
    checked(tmp_path, tensors, **good)
