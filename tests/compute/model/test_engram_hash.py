"""Engram row numbers: multipliers, primes, look-back."""

import numpy as np
import pytest

from compute.model.engram_hash import DEAD, EngramHash
from protocol.errors import ConfigError
from protocol.files.config_rules import engram_column_rows
from protocol.files.model_config import parse_model_config
from tests.support.released_config import released_config

RELEASED = {
    1: [76632096046245, 4839876093313, 35959672319349, 73987337458391],
    14: [67716810739261, 51510806800915, 30921347202721, 82619226485591],
}


def test_the_released_multipliers_and_row_counts_follow_from_the_config():
    config = parse_model_config(released_config(), "released")
    found = EngramHash(config, np.zeros(config.vocab_size, np.int64))._multipliers
    assert [list(map(int, row)) for row in found] == list(RELEASED.values())
    primes = engram_column_rows(config)
    assert tuple(map(sum, primes)) == (384006168, 384016682) == config.engram_n_rows
    assert primes[0][:3] == (16000057, 16000079, 16000081)
    assert primes[1][-1] == 16000889


def by_hand(hashes, config, token_map, ids, position, table):
    """The rule of the specification, one token at a time, in Python's integers."""
    m = list(map(int, hashes._multipliers[table]))
    primes = engram_column_rows(config)[table]
    blocked, mixed, rows = False, 0, []
    for back in range(config.engram_max_ngram):
        blocked = blocked or position - back < 0
        token = token_map[config.engram_pad_id] if blocked else token_map[ids[position - back]]
        mixed ^= int(token) * m[back]
        for head in range(config.engram_n_heads if back else 0):
            column = (back - 1) * config.engram_n_heads + head
            rows.append(mixed % primes[column] + sum(primes[:column]))
    return rows


def test_rows_equal_the_rule_by_hand(tiny, tiny_ids):
    hashes = EngramHash(tiny.config, tiny.token_map)
    history = np.full(hashes.history, DEAD)
    ids = np.concatenate([history, hashes.compress(np.array(tiny_ids))])
    for table in range(len(tiny.config.engram_layers)):
        found = hashes.rows(table, ids)
        for position in range(len(tiny_ids)):
            wanted = by_hand(hashes, tiny.config, tiny.token_map, tiny_ids, position, table)
            assert found[position].tolist() == wanted


def test_the_released_products_do_not_overflow():
    config = parse_model_config(released_config(), "released")
    hashes = EngramHash(config, np.arange(config.vocab_size) % config.engram_compressed_vocab)
    ids = np.full(hashes.history + 1, config.engram_compressed_vocab - 1)
    token_map = [config.engram_compressed_vocab - 1] * config.vocab_size
    assert hashes.rows(1, ids)[0].tolist() == by_hand(hashes, config, token_map, [5] * 4, 3, 1)


def test_a_dead_position_blocks_everything_behind_it(tiny):
    hashes = EngramHash(tiny.config, tiny.token_map)
    pad = int(tiny.token_map[tiny.config.engram_pad_id])
    behind = hashes.rows(0, np.array([7, DEAD, 9, 4]))
    assert behind.tolist() == hashes.rows(0, np.array([pad, pad, 9, 4])).tolist()


def test_a_token_alone_has_the_rows_that_it_has_among_others():
    config = parse_model_config(released_config(), "released")
    hashes = EngramHash(config, np.zeros(config.vocab_size, np.int64))
    ids = np.random.default_rng(0).integers(DEAD, config.engram_compressed_vocab, 60)
    ids[[7, 20, 21]] = DEAD
    for table in range(2):
        many = hashes.rows(table, ids)
        alone = [hashes.rows(table, ids[at : at + hashes.history + 1]) for at in range(len(many))]
        assert np.array_equal(np.concatenate(alone), many)


def test_a_map_of_another_length_is_refused(tiny):
    with pytest.raises(ConfigError, match="has 5 ids, vocab_size is 512"):
        EngramHash(tiny.config, np.arange(5))
