"""What the fields of a model config have to be to each other.

Source: model specification, sections 1.1 (layer roles), 3.2 (Engram rows), 3.6 (candidates).
"""

from __future__ import annotations

from itertools import count, islice
from typing import TYPE_CHECKING

from protocol.errors import ConfigError

from .block_sizes import TILE

if TYPE_CHECKING:
    from .model_config import ModelConfig

ENGRAM_COLUMNS_MAX = 1024  # of all tables: each costs a prime search


def check_rules(config: ModelConfig, where: str) -> None:
    """Raise ConfigError, naming `where`, at the first rule that the config breaks."""
    for problem in (
        _sizes_problem(config),
        _sources_problem(config),
        _candidate_problem(config),
        _engram_problem(config),
    ):
        if problem:
            raise ConfigError(f"{where}: {problem}")


def _sizes_problem(config: ModelConfig) -> str:
    if config.n_heads % config.o_groups:
        return (
            f"num_attention_heads is {config.n_heads}, wanted a multiple of o_groups, "
            f"which is {config.o_groups}"
        )
    width = config.o_groups * config.o_lora_rank
    if width % TILE:
        return f"o_groups x o_lora_rank is {width}, wanted a multiple of {TILE}"
    if config.rope_beta_fast <= config.rope_beta_slow:
        return (
            f"rope_scaling.beta_fast is {config.rope_beta_fast:g}, wanted more than beta_slow, "
            f"which is {config.rope_beta_slow:g}"
        )
    return ""


def _sources_problem(config: ModelConfig) -> str:
    for name, sources in (
        ("kv_source_layer_ids", config.kv_source_layers),
        ("index_source_layer_ids", config.index_source_layers),
    ):
        for layer in sources:
            if config.ratio(layer) == 0:
                return (
                    f"{name} names layer {layer}, whose compress_ratios entry is 0, wanted 1 or 2"
                )
    strangers = [
        layer for layer in config.kv_source_layers if layer not in config.index_source_layers
    ]
    if strangers:
        return (
            f"kv_source_layer_ids names layer {strangers[0]}, which index_source_layer_ids lacks: "
            "a layer that writes compressed rows selects among them too"
        )
    for layer in range(config.n_layers):
        ratio = config.ratio(layer)
        if ratio == 0:
            continue
        source = config.kv_source(layer)
        if source is None:
            return (
                f"layer {layer} has ratio {ratio} and no kv_source_layer_ids entry at or before it"
            )
        if config.ratio(source) != ratio:
            return (
                f"layer {layer} has ratio {ratio}, its source layer {source} has ratio "
                f"{config.ratio(source)}: wanted the same"
            )
    return ""


def _candidate_problem(config: ModelConfig) -> str:
    source = config.candidate_source_layer
    if source < 0:
        return ""
    if source not in config.kv_source_layers:
        return f"candidate_source_layer_id is {source}, wanted one of kv_source_layer_ids"
    for layer in config.index_source_layers:
        if layer > source and config.kv_source(layer) != source:
            return (
                f"index source layer {layer} follows candidate_source_layer_id {source} but reads "
                f"the rows of layer {config.kv_source(layer)}: its candidates would be others"
            )
    positions = config.candidate_top_blocks * config.candidate_block_size
    if positions < config.index_top_k:
        return (
            f"candidate_topk_blocks x candidate_block_size is {positions}, wanted at least "
            f"index_topk, which is {config.index_top_k}"
        )
    return ""


def _engram_problem(config: ModelConfig) -> str:
    columns = config.engram_columns * len(config.engram_layers)
    if columns > ENGRAM_COLUMNS_MAX:
        return f"the Engram tables have {columns} columns, wanted at most {ENGRAM_COLUMNS_MAX}"
    wanted = tuple(sum(primes) for primes in engram_column_rows(config))
    for table, (layer, found, rows) in enumerate(
        zip(config.engram_layers, config.engram_n_rows, wanted, strict=True)
    ):
        if found != rows:
            return (
                f"text_config.engram_num_embeddings[{table}] (layer {layer}) is {found}, wanted "
                f"{rows}: the sum of its columns' primes from engram_vocab_size on"
            )
    return ""


def engram_column_rows(config: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """Rows of each column of each table: the next unused primes, in the order table, order, head.

    The search starts at engram_vocab_size; a prime serves once in the whole model.
    Source: model specification, section 3.2.
    """
    columns = config.engram_columns
    primes = primes_from(config.engram_first_prime, columns * len(config.engram_layers))
    return tuple(primes[start : start + columns] for start in range(0, len(primes), columns))


def primes_from(start: int, n_primes: int) -> tuple[int, ...]:
    """Return the first primes that are not below `start`, ascending."""
    return tuple(islice(filter(_is_prime, count(start)), n_primes))


def _is_prime(number: int) -> bool:
    if number < 4:
        return number in (2, 3)
    if number % 2 == 0:
        return False
    divisor = 3
    while divisor * divisor <= number:
        if number % divisor == 0:
            return False
        divisor += 2
    return True
