"""The Engram of a GGUF: tables, primes, multipliers and token map from its metadata.

Integers are exact to 64 bits, for the multipliers exceed 2^53. A wrong hash gives plausible garbage
without any error, so whatever follows from a rule is compared with it.
Source: model specification, sections 3.2 and 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ConfigError

from .config_rules import engram_column_rows
from .engram_multipliers import engram_multipliers
from .gguf_fields import GgufFields
from .gguf_header import GgufTensor
from .model_config import ModelConfig

RELEASED_VOCABULARY = 129_280
RELEASED_COMPRESSED = 99_092


@dataclass(frozen=True, slots=True)
class GgufEngram:
    """The Engram's hash as the file states it; empty where it does not, never a double."""

    multipliers: tuple[tuple[int, ...], ...]  # [table][look-back], odd, above 2^53
    primes: tuple[tuple[int, ...], ...]  # [table][column], equal to the config's
    offsets: tuple[tuple[int, ...], ...]  # [table][column], sums of the primes before
    token_map: NDArray[np.int64] | None  # token id -> compressed id
    pad: int | None  # compressed


def read_engram(
    fields: GgufFields, tensors: Mapping[str, GgufTensor], vocab_size: int
) -> tuple[GgufEngram, dict[str, Any]]:
    """Return the hash as the file states it, and the Engram's fields of a `text_config`."""
    layers = fields.integers("engram.layer_ids") or ()
    with_table = [
        int(name.split(".")[1]) for name in tensors if name.endswith(".engram.embed.weight")
    ]
    if sorted(with_table) != list(layers):
        raise fields.refusal(
            fields.key("engram.layer_ids"), f"{sorted(with_table)}, the layers with a table"
        )
    n_heads = fields.integer("engram.head_count")
    order = fields.integer("engram.max_ngram_size")
    columns = (order - 1) * n_heads
    primes = _rows_of(fields, "engram.primes", len(layers), columns)
    token_map = _token_map(fields, vocab_size)
    pad_id, pad = _pad(fields, token_map)
    compressed = None if token_map is None else int(token_map.max()) + 1
    released = RELEASED_COMPRESSED if vocab_size == RELEASED_VOCABULARY else None
    engram = GgufEngram(
        multipliers=_rows_of(fields, "engram.multipliers", len(layers), order),
        primes=primes,
        offsets=_rows_of(fields, "engram.offsets", len(layers), columns),
        token_map=token_map,
        pad=pad,
    )
    return engram, {
        "engram_layer_ids": list(layers),
        "engram_num_embeddings": [
            tensors[f"layers.{layer}.engram.embed.weight"].shape[0] for layer in layers
        ],
        "engram_max_ngram_size": order,
        "engram_n_heads": n_heads,
        "engram_head_dim": fields.integer("engram.key_length"),
        "engram_vocab_size": fields.integer(
            "engram.vocab_size", default=min(map(min, primes), default=16_000_000)
        ),
        "engram_pad_token_id": pad_id,
        "engram_compressed_vocab_size": compressed
        or fields.integer("engram.compressed_vocab_size", default=released),
    }


def _rows_of(
    fields: GgufFields, name: str, n_rows: int, n_columns: int
) -> tuple[tuple[int, ...], ...]:
    """Return a flat list as rows, () where it is missing."""
    flat = fields.integers(name)
    if flat is None:
        return ()
    if len(flat) != n_rows * n_columns or any(not 0 <= number < 1 << 63 for number in flat):
        raise fields.refusal(fields.key(name), f"{n_rows} x {n_columns} integers below 2^63")
    return tuple(flat[start : start + n_columns] for start in range(0, len(flat), n_columns))


def _token_map(fields: GgufFields, vocab_size: int) -> NDArray[np.int64] | None:
    flat = fields.integers("engram.token_map")
    if flat is None:
        return None
    if len(flat) != vocab_size or not all(0 <= number < vocab_size for number in flat):
        raise fields.refusal(
            fields.key("engram.token_map"), f"{vocab_size} integers from 0 to {vocab_size - 1}"
        )
    return np.array(flat, np.int64)


def _pad(fields: GgufFields, token_map: NDArray[np.int64] | None) -> tuple[int, int | None]:
    """Return the pad token's own id and its compressed id; the file may state either."""
    token = fields.integer(".tokenizer.ggml.padding_token_id", default=2)
    said = fields.integer("engram.pad_id", default=token)
    if token_map is None:
        return token, None
    pad = int(token_map[token]) if 0 <= token < len(token_map) else -1
    if said not in {token, pad}:
        raise fields.refusal(
            fields.key("engram.pad_id"), f"{token}, or {pad}, the compressed id of token {token}"
        )
    return token, pad


def check_hash(fields: GgufFields, config: ModelConfig, engram: GgufEngram) -> None:
    """Compare the file's numbers with the rules; a wrong one is plausible garbage."""
    wanted = engram_column_rows(config)
    offsets = tuple(tuple(accumulate(primes, initial=0))[:-1] for primes in wanted)
    if engram.primes and engram.primes != wanted:
        raise fields.refusal(
            fields.key("engram.primes"), f"the primes from {config.engram_first_prime} on"
        )
    if engram.offsets and engram.offsets != offsets:
        raise fields.refusal(
            fields.key("engram.offsets"), "the sums of the primes before, from 0 in each table"
        )
    multipliers = engram_multipliers(config)
    for layer, found, computed in zip(
        config.engram_layers, engram.multipliers, multipliers, strict=False
    ):
        if found != computed:
            raise ConfigError(
                f"{fields.path}: {fields.key('engram.multipliers')} are {list(found)} for layer "
                f"{layer}, wanted {list(computed)}, which follow from "
                f"{config.engram_compressed_vocab} compressed ids"
            )
