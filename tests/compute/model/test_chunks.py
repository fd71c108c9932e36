"""Prefill, decode and chunks of any size give the same."""

import pytest
import torch

from compute.model.model import Model
from compute.model.precision import Precision
from protocol.errors import ConfigError
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.local_model import LocalModel


@pytest.mark.parametrize("prefill", [1, 2, 7, 8, 9, 20, 41])
def test_prefill_then_decode_equals_the_full_pass(tiny, tiny_ids, prefill):
    model = tiny.at("unrounded")
    sizes = [prefill] + [1] * (len(tiny_ids) - prefill)
    difference = tiny.cut(model, tiny_ids, sizes) - tiny.full(model, tiny_ids)
    assert float(difference.abs().max()) <= 1e-5


@pytest.mark.parametrize("chunk", [5, 8, 13])
def test_chunks_equal_the_full_pass(tiny, tiny_ids, chunk):
    model = tiny.at("unrounded")
    n = len(tiny_ids)
    sizes = [chunk] * (n // chunk) + [n % chunk] * (n % chunk > 0)
    difference = tiny.cut(model, tiny_ids, sizes) - tiny.full(model, tiny_ids)
    assert float(difference.abs().max()) <= 1e-5


def test_uneven_chunks_of_a_long_text_meet_the_rounding_free_full_pass(demo):
    # 1,400 tokens: a real choice of rows, restricted candidate blocks, several query tiles.
    ids = torch.randint(11, 4096, (1400,), generator=torch.Generator().manual_seed(2)).tolist()
    model = demo.at("unrounded")
    cut = demo.cut(model, ids, [3, 600, 1, 511, 284, 1])
    difference = (cut - demo.full(model, ids)).abs().amax(1)
    # Index scores may tie within single precision, and then a row differs: rare, not systematic.
    assert float((difference <= 1e-3).float().mean()) > 0.99


def test_the_last_logits_are_the_last_row_of_all(tiny, tiny_ids):
    model = tiny.at("highway")
    every = tiny.full(model, tiny_ids)
    sequence = model.new_sequence(len(tiny_ids))
    last = model.forward(sequence, tiny_ids, tiny.source, tiny.source)
    assert last.shape == (1, tiny.config.vocab_size)
    assert torch.allclose(last[0], every[-1], atol=1e-5)
    assert sequence.position == len(tiny_ids)


@pytest.mark.parametrize("precision", ["vendor", "highway", "wide", "unrounded"])
def test_decode_equals_the_full_pass_at_every_precision(tiny, tiny_ids, precision):
    model = tiny.at(precision)
    one_by_one = tiny.cut(model, tiny_ids[:24], [1] * 24)
    assert torch.equal(one_by_one.argmax(1), tiny.full(model, tiny_ids[:24]).argmax(1))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "no token ids"),
        ([1, 2, 512], "token id 512 at position 2: the vocabulary has 512 ids"),
        ([-1], "token id -1 at position 0"),
        ([3] * 9, "0 \\+ 9 tokens are more than the context of 8"),
    ],
)
def test_bad_ids_are_refused_before_anything_changes(tiny, ids, message):
    model = tiny.at("unrounded")
    sequence = model.new_sequence(8)
    with pytest.raises(ConfigError, match=message):
        model.forward(sequence, ids, tiny.source, tiny.source)
    assert sequence.position == 0
    assert (sequence.last_ids == -1).all()


def test_a_context_beyond_the_model_is_refused(tiny):
    with pytest.raises(ConfigError, match="4097 tokens, the model takes 1 to 4096"):
        tiny.at("unrounded").new_sequence(4097)


def test_two_streams_layers_without_engram_and_other_shapes_run(tmp_path):
    settings = {"hc_mult": 2, "engram_layer_ids": [], "engram_num_embeddings": []}
    write_fake_checkpoint(tmp_path, n_layers=3, text_config=settings)
    other = LocalModel(tmp_path)
    model = Model(other.config, other.weights, other.token_map, Precision.UNROUNDED)
    ids = list(range(20))
    logits = other.full(model, ids)
    assert bool(torch.isfinite(logits).all())
    assert torch.allclose(other.cut(model, ids, [7, 1, 12]), logits, atol=1e-4)
