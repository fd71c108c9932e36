"""Tests of protocol/files/model_config.py and the fields and rules behind it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ConfigError
from protocol.files.config_rules import engram_column_rows, primes_from
from protocol.files.model_config import load_model_config, parse_model_config
from tests.support.fake_checkpoint import fake_config
from tests.support.released_config import released_config

REMOVE = object()


def _changed(path: str, value: object) -> dict[str, Any]:
    raw = copy.deepcopy(fake_config())
    *parents, name = path.split(".")
    inner = raw
    for parent in parents:
        inner = inner[parent]
    if value is REMOVE:
        del inner[name]
    else:
        inner[name] = value
    return raw


def _refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_model_config(raw, "M/config.json")
    return str(caught.value)


def _leaves(raw: dict[str, Any], prefix: str = "") -> list[str]:
    names: list[str] = []
    for name, value in raw.items():
        inner = isinstance(value, dict)
        names += _leaves(value, f"{prefix}{name}.") if inner else [prefix + name]
    return names


OPTIONAL = {
    "architectures",
    "quantization_config.activation_scheme",
    "text_config.model_type",
    "text_config.tie_word_embeddings",
    "text_config.attention_bias",
    "text_config.attention_dropout",
}
FIELDS = _leaves(fake_config())


def test_released_config_has_the_published_roles() -> None:
    config = parse_model_config(released_config(), "released")
    assert config.compress_ratios == (0,) * 2 + (2,) * 18 + (1,) * 20
    assert config.n_draft_stages == 3
    assert [config.kv_source(n) for n in (0, 1, 2, 7, 8, 13, 19, 20, 39)] == [
        None, None, 2, 2, 8, 8, 14, 20, 20,
    ]  # fmt: skip
    assert [config.index_source(n) for n in (0, 2, 23, 24, 27, 39)] == [None, 2, 20, 24, 24, 36]
    assert [config.engram_table(n) for n in (0, 1, 14)] == [None, 0, 1]
    assert config.engram_columns == 24
    assert config.engram_row_bytes == 264
    assert config.n_keys == 15_360
    assert config.norm_eps == 1e-20


def test_released_column_primes_are_the_published_ones() -> None:
    tables = engram_column_rows(parse_model_config(released_config(), "released"))
    assert [len(table) for table in tables] == [24, 24]
    assert (tables[0][0], tables[0][7], tables[0][23]) == (16000057, 16000183, 16000463)
    assert (tables[1][0], tables[1][23]) == (16000477, 16000889)
    assert [sum(table) for table in tables] == [384006168, 384016682]


def test_primes_start_at_the_given_number() -> None:
    assert primes_from(2, 6) == (2, 3, 5, 7, 11, 13)
    assert primes_from(24, 3) == (29, 31, 37)


def test_golden_and_demo_configs_are_accepted(tiny_dir: Path, demo_dir: Path) -> None:
    assert load_model_config(tiny_dir).n_layers == 9
    assert load_model_config(demo_dir).n_experts == 32


@pytest.mark.parametrize("field", FIELDS)
def test_a_missing_field_is_named(field: str) -> None:
    raw = _changed(field, REMOVE)
    if field in OPTIONAL:
        parse_model_config(raw, "M/config.json")
        return
    message = _refusal(raw)
    assert message.startswith("M/config.json: ")
    assert f"{field} is missing" in message


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [True, "7", {}, [True], -3, 1.5, float("nan"), 1 << 70])
def test_a_value_of_a_wrong_type_or_range_is_named(field: str, value: object) -> None:
    if (field, value) in LEGAL:
        return
    message = _refusal(_changed(field, value))
    assert field.rsplit(".", 1)[-1] in message
    assert "wanted" in message


LEGAL: list[tuple[str, object]] = [
    ("text_config.norm_topk_prob", True),
    ("text_config.candidate_source_layer_id", -3),
    *[
        (f"text_config.{name}", 1.5)
        for name in (
            "swiglu_limit",
            "rope_theta",
            "compress_rope_theta",
            "rope_scaling.factor",
            "rope_scaling.beta_fast",
            "rope_scaling.beta_slow",
            "routed_scaling_factor",
        )
    ],
]


def test_deepseek_v4_is_refused_by_name() -> None:
    message = _refusal(_changed("model_type", "deepseek_v4"))
    assert "'deepseek_v4'" in message
    assert "DeepSeek-V4 is another architecture" in message
    assert "'deepseek_v41'" in message


@pytest.mark.parametrize("found", ["llama", "", None, 41, ["deepseek_v41"]])
def test_an_unknown_model_type_is_refused(found: object) -> None:
    assert "wanted 'deepseek_v41'" in _refusal(_changed("model_type", found))


def test_another_architecture_or_tile_is_refused() -> None:
    assert "architectures" in _refusal(_changed("architectures", ["DeepseekV4ForCausalLM"]))
    message = _refusal(_changed("quantization_config.weight_block_size", [128, 128]))
    assert "[128, 128], wanted [32, 32]" in message


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_experts_per_tok", 9, "from 1 to 8"),
        ("hidden_size", 65, "that 32 divides"),
        ("qk_rope_head_dim", 34, "from 2 to 32"),
        ("o_groups", 3, "wanted an integer from 1 to 2"),
        ("o_lora_rank", 17, "o_groups x o_lora_rank is 34"),
        ("compress_ratios", [0, 0, 2], "8 or 9 entries, not 3"),
        ("compress_ratios", [0, 0, 4, 2, 2, 1, 1, 1], "integers from 0 to 2"),
        ("compress_ratios", [0, 0, 2, 1, 2, 1, 1, 1], "layer 3 has ratio 1, its source layer 2"),
        (
            "compress_ratios",
            [0, 1, 2, 2, 2, 1, 1, 1],
            "layer 1 has ratio 1 and no kv_source",
        ),
        ("compress_ratios", [0, 0, 0, 2, 2, 1, 1, 1], "names layer 2, whose compress_ratios"),
        ("kv_source_layer_ids", [4, 2, 5], "strictly ascending"),
        ("kv_source_layer_ids", [2, 2, 5], "strictly ascending"),
        ("kv_source_layer_ids", [2, 4, 5, 6], "layer 6, which index_source_layer_ids lacks"),
        ("index_source_layer_ids", [2, 4, 5, 8], "integers from 0 to 7"),
        ("candidate_source_layer_id", 7, "wanted one of kv_source_layer_ids"),
        ("candidate_source_layer_id", 4, "index source layer 5 follows"),
        ("candidate_topk_blocks", 1, "wanted at least index_topk, which is 8"),
        ("engram_num_embeddings", [204, 359], "(layer 4) is 359, wanted 358"),
        ("engram_num_embeddings", [204], "2 entries"),
        ("engram_layer_ids", [1, 9], "integers from 0 to 7"),
        ("engram_n_heads", 200, "have 1200 columns, wanted at most 1024"),
        ("num_hash_layers", 3, "wanted 0"),
        ("gate_temp", 2.0, "wanted 1.0"),
        ("n_shared_experts", 2, "wanted an integer from 1 to 1"),
    ],
)
def test_a_value_that_breaks_a_rule_is_named(field: str, value: object, words: str) -> None:
    assert words in _refusal(_changed(f"text_config.{field}", value))


def test_draft_entries_are_cut_and_may_be_absent() -> None:
    raw = fake_config()
    with_drafts = parse_model_config(raw, "x")
    raw["text_config"]["compress_ratios"] = raw["text_config"]["compress_ratios"][:-1]
    assert parse_model_config(raw, "x") == with_drafts
    assert len(with_drafts.compress_ratios) == with_drafts.n_layers


def test_candidates_are_off_below_zero() -> None:
    raw = _changed("text_config.candidate_source_layer_id", -7)
    assert parse_model_config(raw, "x").candidate_source_layer == -1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not JSON"),
        (b"[]", "wanted a JSON object"),
        (b"\xff{}", "not JSON in UTF-8"),
        (b'{"a":1,"a":2}', "'a' stands twice"),
        (b'{"a":NaN}', "NaN is not a JSON number"),
        (b"[" * 100_000, "nested too deeply"),
        (b"9" * 5000, "not JSON"),
        (b" " * (1 << 24) + b" ", "larger than"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ConfigError, match=r"config\.json: ") as caught:
        load_model_config(tmp_path)
    assert words in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: no such file: a model's folder holds"):
        load_model_config(tmp_path)


def test_of_the_current_folder_the_message_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^\./config\.json: no such file"):
        load_model_config(Path())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@given(field=st.sampled_from([*FIELDS, "text_config", "quantization_config"]), value=JSON)
def test_any_value_in_any_field_is_accepted_or_a_config_error(field: str, value: object) -> None:
    raw = _changed(field, value)
    try:
        config = parse_model_config(raw, "x")
    except ConfigError:
        return
    assert json.dumps(config.n_layers)
    assert len(config.compress_ratios) == config.n_layers
