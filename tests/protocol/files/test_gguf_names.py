"""Official names and GGUF names, both writers'."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.errors import ShardError
from protocol.files.block_sizes import BLOCK_TYPE_OF_NAME
from protocol.files.gguf_header import GgufTensor
from protocol.files.gguf_names import by_official_name, gguf_names, official_name
from protocol.files.gguf_table import gguf_shapes
from protocol.files.model_config import parse_model_config
from protocol.files.safetensors_header import Shard
from tests.support.released_config import released_config

SHARD = Shard(Path("x.gguf"), 1 << 20)


def named(*names: str) -> dict[str, GgufTensor]:
    block = BLOCK_TYPE_OF_NAME["F32"]
    return {name: GgufTensor(name, (1,), block, SHARD, 0, 4) for name in names}


def test_the_released_model_has_1046_tensors_with_one_usual_name_each():
    shapes = gguf_shapes(parse_model_config(released_config(), "released"))
    with_vision_bias = set(shapes) | {f"layers.{i}.ffn.gate.bias_vl" for i in range(40)}
    assert len(with_vision_bias) == 1046
    usual = {gguf_names(name)[0] for name in with_vision_bias}
    assert len(usual) == 1046
    assert {official_name(name) for name in usual} == with_vision_bias


@pytest.mark.parametrize(
    ("official", "usual", "dims"),
    [
        ("embed.weight", "token_embd.weight", (5120, 129280)),
        ("head.weight", "output.weight", (5120, 129280)),
        ("norm.weight", "output_norm.weight", (5120,)),
        ("layers.7.hc_ffn_fn", "blk.7.hc_ffn_fn.weight", (20480, 24)),
        ("layers.0.attn.attn_sink", "blk.0.attn_sinks.weight", (64,)),
        ("layers.39.attn.wq_b.weight", "blk.39.attn_q_b.weight", (1280, 32768)),
        ("layers.0.attn.kv_norm.weight", "blk.0.attn_kv_a_norm.weight", (512,)),
        ("layers.0.attn.wo_a.weight", "blk.0.attn_output_a.weight", (4096, 8192)),
        ("layers.2.attn.compressor.wgate.weight", "blk.2.attn_compressor_gate.weight", (5120, 512)),
        ("layers.24.attn.indexer.wq_b.weight", "blk.24.indexer.attn_q_b.weight", (1280, 4096)),
        ("layers.24.attn.indexer.weights_proj.weight", "blk.24.indexer.proj.weight", (5120, 32)),
        ("layers.20.attn.indexer.wk.weight", "blk.20.indexer.attn_k.weight", (512, 128)),
        ("layers.5.ffn.gate.weight", "blk.5.ffn_gate_inp.weight", (5120, 384)),
        ("layers.5.ffn.gate.bias", "blk.5.exp_probs_b.bias", (384,)),
        ("layers.5.ffn.experts.*.w1.weight", "blk.5.ffn_gate_exps.weight", (5120, 2304, 384)),
        ("layers.5.ffn.experts.*.w3.weight", "blk.5.ffn_up_exps.weight", (5120, 2304, 384)),
        ("layers.5.ffn.experts.*.w2.weight", "blk.5.ffn_down_exps.weight", (2304, 5120, 384)),
        ("layers.5.ffn.shared_experts.w2.weight", "blk.5.ffn_down_shexp.weight", (2304, 5120)),
        ("layers.1.engram.embed.weight", "blk.1.engram_embd.weight", (256, 384006168)),
        ("layers.14.engram.wkv.weight", "blk.14.engram_wkv.weight", (6144, 25600)),
        ("layers.14.engram.q_weight", "blk.14.engram_q.weight", (5120, 4)),
    ],
)
def test_names_and_dims_are_those_of_the_specification(official, usual, dims):
    assert gguf_names(official)[0] == usual
    assert official_name(usual) == official
    shapes = gguf_shapes(parse_model_config(released_config(), "released"))
    assert shapes[official][::-1] == dims


def test_ds4_spells_three_engram_tensors_otherwise():
    for official, ds4 in (
        ("layers.1.engram.wkv.weight", "blk.1.engram_kv.weight"),
        ("layers.1.engram.q_weight", "blk.1.engram_q_norm.weight"),
        ("layers.1.engram.k_weight", "blk.1.engram_k_norm.weight"),
    ):
        assert gguf_names(official)[1] == ds4
        assert official_name(ds4) == official


def test_an_experts_number_gives_its_stack():
    for expert in ("0", "383", "*"):
        name = f"layers.3.ffn.experts.{expert}.w2.weight"
        assert gguf_names(name) == ("blk.3.ffn_down_exps.weight",)


def test_strangers_have_no_other_name():
    for name in (
        "layers.3.attn.wq_a.scale",
        "layers.03.attn_norm.weight",
        "layers.3.ffn.experts.01.w2.weight",
        "mtp.0.norm.weight",
        "",
    ):
        assert gguf_names(name) == ()
    for name in ("blk.3.attn_q.weight", "blk.x.attn_norm.weight", "blk.03.attn_norm.weight", ""):
        assert official_name(name) is None


def test_tensors_are_found_under_either_spelling_but_not_both():
    found = by_official_name(named("blk.1.engram_kv.weight", "token_embd.weight", "odd"))
    assert set(found) == {"layers.1.engram.wkv.weight", "embed.weight", "odd"}
    with pytest.raises(
        ShardError, match=r"engram_kv\.weight' and 'blk\.1\.engram_wkv\.weight' are"
    ):
        by_official_name(named("blk.1.engram_kv.weight", "blk.1.engram_wkv.weight"))
