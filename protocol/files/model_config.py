"""The model config of the DeepSeek-V4.1 layout: `config.json` with its `text_config`.

Owns the names under which every room reads the model's sizes. Invariants: a ModelConfig that exists
has been checked, field by field and against itself, so nobody checks it again. Fields of the vision
tower and of the draft stages are skipped. Layer roles: the model specification, "Layer roles".
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError

from .block_sizes import TILE
from .config_fields import ConfigFields
from .config_groups import (
    attention_fields,
    check_kind,
    engram_fields,
    rope_fields,
    stream_fields,
)
from .config_rules import check_rules
from .strict_json import JsonError, parse_strict, read_bounded

CONFIG_NAME = "config.json"
CONFIG_BYTES_MAX = 1 << 24


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Every size and switch of one model, checked. Lists are tuples; a layer counts from 0."""

    vocab_size: int
    hidden_size: int
    n_layers: int
    n_heads: int
    head_dim: int
    rope_head_dim: int  # the last channels of a head
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]  # one a layer: 0 window only, 1, 2
    rope_theta: float  # layers of ratio 0
    compress_rope_theta: float  # layers of ratio > 0
    rope_factor: float
    rope_original_length: int
    rope_beta_fast: float
    rope_beta_slow: float
    max_positions: int
    kv_source_layers: tuple[int, ...]
    index_source_layers: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_top_k: int
    candidate_source_layer: int  # -1 = off
    candidate_top_blocks: int
    candidate_block_size: int
    hc_mult: int  # residual streams
    hc_sinkhorn_iters: int
    hc_eps: float
    norm_eps: float
    n_experts: int
    top_k: int
    n_shared_experts: int
    expert_width: int
    routed_scale: float
    swiglu_limit: float
    engram_layers: tuple[int, ...]
    engram_n_rows: tuple[int, ...]  # one a table
    engram_max_ngram: int
    engram_n_heads: int
    engram_head_dim: int
    engram_first_prime: int  # the prime search starts here
    engram_pad_id: int
    engram_compressed_vocab: int
    bos_id: int
    eos_id: int
    pad_id: int
    image_id: int
    n_draft_stages: int  # `mtp.*` stages in the file, skipped
    tile: int = TILE

    def ratio(self, layer: int) -> int:
        """Return the layer's compression ratio: 0, 1 or 2."""
        return self.compress_ratios[layer]

    def kv_source(self, layer: int) -> int | None:
        """Return the layer whose compressed rows `layer` reads; None where its ratio is 0."""
        return self._source(layer, self.kv_source_layers)

    def index_source(self, layer: int) -> int | None:
        """Return the layer whose selection `layer` uses; None where its ratio is 0."""
        return self._source(layer, self.index_source_layers)

    def engram_table(self, layer: int) -> int | None:
        """Return the number of the Engram table before `layer`, None where there is none."""
        return self.engram_layers.index(layer) if layer in self.engram_layers else None

    @property
    def engram_columns(self) -> int:
        """Rows read per token and table: one for each n-gram order from 2 and each head."""
        return (self.engram_max_ngram - 1) * self.engram_n_heads

    @property
    def engram_row_bytes(self) -> int:
        """Bytes of one Engram row in the ring: E4M3 values, then one E8M0 scale for each 32."""
        return self.engram_head_dim + self.engram_head_dim // TILE

    @property
    def n_keys(self) -> int:
        """Number of (layer, expert) keys; the flat key is layer * n_experts + expert."""
        return self.n_layers * self.n_experts

    def _source(self, layer: int, sources: tuple[int, ...]) -> int | None:
        if self.ratio(layer) == 0:
            return None
        return max((source for source in sources if source <= layer), default=None)


def load_model_config(directory: Path) -> ModelConfig:
    """Return the checked config of a model directory; raises ConfigError."""
    return parse_model_config(read_config_json(directory), str(directory / CONFIG_NAME))


def read_config_json(directory: Path) -> dict[str, Any]:
    """Return `config.json` of a model directory as parsed JSON; raises ConfigError."""
    path = directory / CONFIG_NAME
    try:
        with path.open("rb") as file:
            data = read_bounded(file, CONFIG_BYTES_MAX)
    except FileNotFoundError:
        raise ConfigError(
            f"{directory}/{CONFIG_NAME}: no such file: a model's folder holds {CONFIG_NAME}, the "
            "shards and tokenizer.json"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(data) > CONFIG_BYTES_MAX:
        raise ConfigError(f"{path}: is larger than {CONFIG_BYTES_MAX} bytes")
    try:
        raw = parse_strict(data)
    except JsonError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: holds {type(raw).__name__}, wanted a JSON object")
    return raw


def parse_model_config(raw: dict[str, Any], where: str) -> ModelConfig:
    """Return the checked config of parsed JSON; `where` names it in a ConfigError."""
    root = ConfigFields(raw, where)
    check_kind(root)
    config = _read_fields(root, root.inner("text_config"))
    check_rules(config, where)
    return config


def _read_fields(root: ConfigFields, text: ConfigFields) -> ModelConfig:
    n_layers = text.integer("num_hidden_layers", 1, 1024)
    n_experts = text.integer("n_routed_experts", 1, 4096)
    vocab = text.integer("vocab_size", 1, 1 << 24)
    drafts = text.integer("num_nextn_predict_layers", 0, 64)
    return ModelConfig(
        vocab_size=vocab,
        n_layers=n_layers,
        n_experts=n_experts,
        n_draft_stages=drafts,
        top_k=text.integer("num_experts_per_tok", 1, min(n_experts, 64)),
        n_shared_experts=text.integer("n_shared_experts", 1, 1),
        expert_width=text.integer("moe_intermediate_size", TILE, 1 << 17, multiple=TILE),
        routed_scale=text.number("routed_scaling_factor", 1e-6, 1e6),
        swiglu_limit=text.number("swiglu_limit", 1e-6, 1e6),
        max_positions=text.integer("max_position_embeddings", 1, 1 << 31),
        norm_eps=text.number("rms_norm_eps", 1e-37, 1e-2),
        bos_id=root.integer("bos_token_id", 0, vocab - 1),
        eos_id=root.integer("eos_token_id", 0, vocab - 1),
        pad_id=root.integer("pad_token_id", 0, vocab - 1),
        image_id=root.integer("image_token_id", 0, vocab - 1),
        **attention_fields(text, n_layers, drafts),
        **rope_fields(text),
        **stream_fields(text),
        **engram_fields(text, n_layers, vocab),
    )
