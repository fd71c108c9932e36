"""Official tensor names and their GGUF spellings, llama.cpp's and DS4's.

A routed expert's matrix is one tensor in the official checkpoint and one third of a stack over all
experts in GGUF: its official name is written with `*` for the expert. Scales have no GGUF name,
they lie inside the blocks. Source: model specification, section 7.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from protocol.errors import ShardError

from .gguf_header import GgufTensor

_WHOLE = {
    "embed.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
}
# Official name behind `layers.L.`, then the spellings behind `blk.L.`, the usual one first.
_LAYER: dict[str, tuple[str, ...]] = {
    "attn_norm.weight": ("attn_norm.weight",),
    "ffn_norm.weight": ("ffn_norm.weight",),
    "hc_attn_fn": ("hc_attn_fn.weight",),
    "hc_attn_base": ("hc_attn_base.weight",),
    "hc_attn_scale": ("hc_attn_scale.weight",),
    "hc_ffn_fn": ("hc_ffn_fn.weight",),
    "hc_ffn_base": ("hc_ffn_base.weight",),
    "hc_ffn_scale": ("hc_ffn_scale.weight",),
    "attn.attn_sink": ("attn_sinks.weight",),
    "attn.wq_a.weight": ("attn_q_a.weight",),
    "attn.q_norm.weight": ("attn_q_a_norm.weight",),
    "attn.wq_b.weight": ("attn_q_b.weight",),
    "attn.wkv.weight": ("attn_kv.weight",),
    "attn.kv_norm.weight": ("attn_kv_a_norm.weight",),
    "attn.wo_a.weight": ("attn_output_a.weight",),
    "attn.wo_b.weight": ("attn_output_b.weight",),
    "attn.compressor.wkv.weight": ("attn_compressor_kv.weight",),
    "attn.compressor.wgate.weight": ("attn_compressor_gate.weight",),
    "attn.compressor.norm.weight": ("attn_compressor_norm.weight",),
    "attn.indexer.wq_b.weight": ("indexer.attn_q_b.weight",),
    "attn.indexer.weights_proj.weight": ("indexer.proj.weight",),
    "attn.indexer.wk.weight": ("indexer.attn_k.weight",),
    "attn.indexer.k_norm.weight": ("indexer.k_norm.weight",),
    "ffn.gate.weight": ("ffn_gate_inp.weight",),
    "ffn.gate.bias": ("exp_probs_b.bias",),
    "ffn.gate.bias_vl": ("exp_probs_b_vl.bias",),
    "ffn.experts.*.w1.weight": ("ffn_gate_exps.weight",),
    "ffn.experts.*.w3.weight": ("ffn_up_exps.weight",),
    "ffn.experts.*.w2.weight": ("ffn_down_exps.weight",),
    "ffn.shared_experts.w1.weight": ("ffn_gate_shexp.weight",),
    "ffn.shared_experts.w3.weight": ("ffn_up_shexp.weight",),
    "ffn.shared_experts.w2.weight": ("ffn_down_shexp.weight",),
    "engram.embed.weight": ("engram_embd.weight",),
    "engram.wkv.weight": ("engram_wkv.weight", "engram_kv.weight"),
    "engram.q_weight": ("engram_q.weight", "engram_q_norm.weight"),
    "engram.k_weight": ("engram_k.weight", "engram_k_norm.weight"),
}
_OFFICIAL_WHOLE = {gguf: official for official, gguf in _WHOLE.items()}
_OFFICIAL_LAYER = {gguf: official for official, names in _LAYER.items() for gguf in names}
_NUMBER = r"(0|[1-9][0-9]{0,3})"
_LAYER_NAME = re.compile(rf"layers\.{_NUMBER}\.(.+)")
_BLOCK_NAME = re.compile(rf"blk\.{_NUMBER}\.(.+)")
_EXPERT = re.compile(rf"ffn\.experts\.{_NUMBER}\.")


def gguf_names(official: str) -> tuple[str, ...]:
    """Return every GGUF spelling of an official name, the usual one first; () where there is none.

    An expert's name may have its number or `*`: both give the stack.
    """
    if official in _WHOLE:
        return (_WHOLE[official],)
    match = _LAYER_NAME.fullmatch(official)
    if match is None:
        return ()
    inner = _EXPERT.sub("ffn.experts.*.", match[2], count=1)
    return tuple(f"blk.{match[1]}.{name}" for name in _LAYER.get(inner, ()))


def official_name(gguf: str) -> str | None:
    """Return the official name of a GGUF tensor, `*` for the expert; None for a stranger."""
    if gguf in _OFFICIAL_WHOLE:
        return _OFFICIAL_WHOLE[gguf]
    match = _BLOCK_NAME.fullmatch(gguf)
    if match is None or match[2] not in _OFFICIAL_LAYER:
        return None
    return f"layers.{match[1]}.{_OFFICIAL_LAYER[match[2]]}"


def by_official_name(tensors: Mapping[str, GgufTensor]) -> dict[str, GgufTensor]:
    """Return the tensors under their official names, strangers under their own.

    Raises ShardError where one official tensor stands under two spellings.
    """
    named: dict[str, GgufTensor] = {}
    for tensor in tensors.values():
        name = official_name(tensor.name) or tensor.name
        other = named.setdefault(name, tensor)
        if other is not tensor:
            raise ShardError(
                f"{tensor.shard.path}: tensors {other.name!r} and {tensor.name!r} are both {name}"
            )
    return named
