"""Made-up traces have the statistics that they are made for."""

from __future__ import annotations

import numpy as np
import pytest

from expert_daemon.routing_trace import (
    RoutingTrace,
    TraceShape,
    from_tokens,
    shape_of,
    shared_with_previous,
)
from expert_daemon.synthetic_trace import FLASH, RECIPES, synthetic_trace
from expert_daemon.trace_format import is_token
from protocol.files.checkpoint import open_checkpoint
from tests.support.fake_checkpoint import write_fake_checkpoint

SMALL = TraceShape(8, 96, 4, expert_bytes=100, slot_bytes=4096)


@pytest.mark.parametrize("kind", RECIPES)
def test_adjacent_tokens_share_39_percent_of_their_experts(kind):
    trace = synthetic_trace(kind, 400)
    assert abs(shared_with_previous(trace) - 0.39) < 0.02
    assert all(is_token(keys, FLASH) for keys in trace.steps())


@pytest.mark.parametrize("kind", RECIPES)
def test_a_seed_gives_one_trace(kind):
    one, same, other = (synthetic_trace(kind, 50, shape=SMALL, seed=seed) for seed in (1, 1, 2))
    assert (one.keys == same.keys).all()
    assert (one.keys != other.keys).any()


def share_of_top(trace, share):
    counts = np.sort(np.bincount(trace.keys, minlength=trace.shape.n_keys))[::-1]
    return counts[: int(share * len(counts))].sum() / counts.sum()


def test_the_kinds_differ_in_how_uneven_they_are():
    top = {kind: share_of_top(synthetic_trace(kind, 600), 0.1) for kind in RECIPES}
    assert top["flat"] < 0.25
    assert top["skewed"] > 0.55
    assert top["flat"] < top["topics"] < top["skewed"]


def test_favourites_move_where_they_should():
    def alike(kind, first, second):
        trace = synthetic_trace(kind, 2400, shape=SMALL)
        n_keys = trace.shape.n_keys
        early, late = (
            np.bincount(np.concatenate([trace.step(n) for n in span]), minlength=n_keys)
            for span in (first, second)
        )
        return np.corrcoef(early, late)[0, 1]

    spans = range(400), range(2000, 2400)
    assert alike("skewed", *spans) > 0.9
    assert alike("drift", *spans) < 0.7
    assert alike("drift", *spans) < alike("drift", range(400), range(400, 800)) - 0.1


def test_recent_picks_come_back():
    trace = synthetic_trace("recent", 600, shape=SMALL)
    seen = [set(keys.tolist()) for keys in trace.steps()]
    lately = [
        len(now & set().union(*seen[at - 100 : at])) / 32 for at, now in enumerate(seen) if at > 100
    ]
    assert np.mean(lately) > 0.9


def test_a_share_out_of_reach_comes_as_near_as_it_can():
    assert shared_with_previous(synthetic_trace("flat", 300, shape=SMALL, shared=1.0)) > 0.97
    assert shared_with_previous(synthetic_trace("flat", 300, shape=SMALL, shared=0.0)) < 0.06


def test_tokens_become_ascending_keys():
    shape = TraceShape(2, 10, 2, expert_bytes=1, slot_bytes=1)
    trace = from_tokens(shape, np.array([[[3, 1], [9, 0]], [[1, 2], [9, 8]]]))
    assert [keys.tolist() for keys in trace.steps()] == [[1, 3, 10, 19], [1, 2, 18, 19]]
    assert shared_with_previous(trace) == 0.5
    assert (len(trace), trace.n_tokens, trace.step(1).tolist()) == (2, 2, [1, 2, 18, 19])


def test_a_chunk_between_tokens_makes_no_pair():
    shape = TraceShape(1, 10, 2, expert_bytes=1, slot_bytes=1)
    keys, starts = np.array([0, 1, 0, 1, 2, 0, 1, 1, 2]), np.array([0, 2, 5, 7, 9])
    trace = RoutingTrace(shape, keys, starts, np.array([True, False, True, True]))
    assert shared_with_previous(trace) == 0.5
    no_steps = RoutingTrace(shape, keys[:0], starts[:1], np.zeros(0, np.bool_))
    assert shared_with_previous(no_steps) == 0


def test_a_checkpoint_gives_its_shape(tmp_path):
    directory = write_fake_checkpoint(tmp_path, n_layers=5, n_experts=24, top_k=2)
    checkpoint = open_checkpoint(directory)
    shape = shape_of(checkpoint)
    assert (shape.n_layers, shape.n_experts, shape.top_k) == (5, 24, 2)
    assert shape.slot_bytes == checkpoint.slice_map.image.slot_bytes
    assert shape.fingerprint == checkpoint.fingerprint
