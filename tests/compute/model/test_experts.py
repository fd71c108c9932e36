"""Routed experts: order of summation, the source's freedom, what is refused."""

import numpy as np
import pytest
import torch

from compute.model.moe import Plan
from compute.model.record import Record
from compute.model.sources import ExpertMatrices
from protocol.errors import ShardError
from tests.support.local_sources import LocalSources


class Altered(LocalSources):
    """Local sources, one expert's pieces changed."""

    def __init__(self, checkpoint, layer, expert, **pieces):
        super().__init__(checkpoint)
        self.wanted, self.pieces = (layer, expert), pieces

    def stream(self, layer, experts):
        for expert, matrices in super().stream(layer, experts):
            yield (
                expert,
                (matrices._replace(**self.pieces) if (layer, expert) == self.wanted else matrices),
            )


def test_a_plan_groups_picks_by_ascending_expert():
    picks = torch.tensor([[5, 2], [2, 7], [5, 0]])
    weights = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    plan = Plan(picks, weights)
    assert plan.experts == [0, 2, 5, 7]
    assert [tokens.tolist() for tokens in plan.tokens] == [[2], [0, 1], [0, 2], [1]]
    found = [w.tolist() for w in plan.weights]
    assert found == [pytest.approx(w) for w in ([0.6], [0.2, 0.3], [0.1, 0.5], [0.4])]


def test_experts_are_asked_for_in_ascending_order_once_a_layer(tiny, tiny_ids):
    source = LocalSources(tiny.checkpoint)
    model = tiny.at("highway")
    model.forward(model.new_sequence(60), tiny_ids, source, source)
    assert [layer for layer, _ in source.asked] == list(range(tiny.config.n_layers))
    assert all(list(experts) == sorted(set(experts)) for _, experts in source.asked)


@pytest.mark.parametrize("size", [1, 56])
def test_a_source_that_reuses_one_buffer_gives_the_same_bits(tiny, tiny_ids, size):
    model = tiny.at("highway")
    reusing = LocalSources(tiny.checkpoint, reuse=True)
    plain, reused = model.new_sequence(60), model.new_sequence(60)
    for first in range(0, 56, size):
        ids = tiny_ids[first : first + size]
        wanted = model.forward(plain, ids, tiny.source, tiny.source)
        assert torch.equal(model.forward(reused, ids, reusing, reusing), wanted)


@pytest.mark.parametrize("piece", ["gate_scale", "up_scale", "down_scale"])
def test_scale_byte_255_is_refused_with_layer_and_expert(tiny, piece):
    record = Record()
    model = tiny.at("unrounded")
    model.forward(model.new_sequence(4), [9], tiny.source, tiny.source, record=record)
    layer, expert = 3, int(record.picks[3][0, 1])
    good = dict(tiny.source.stream(layer, [expert]))[expert]
    scales = getattr(good, piece).clone()
    scales[-1, -1] = 255
    source = Altered(tiny.checkpoint, layer, expert, **{piece: scales})
    with pytest.raises(ShardError, match=f"layer {layer} expert {expert}: .*255"):
        model.forward(model.new_sequence(4), [9], source, source)


def test_an_expert_of_another_shape_is_refused(tiny):
    record = Record()
    model = tiny.at("unrounded")
    model.forward(model.new_sequence(4), [9], tiny.source, tiny.source, record=record)
    expert = int(record.picks[0][0, 0])
    short = torch.zeros(128, 1, dtype=torch.uint8)
    source = Altered(tiny.checkpoint, 0, expert, down_scale=short)
    with pytest.raises(ShardError, match=f"layer 0 expert {expert}"):
        model.forward(model.new_sequence(4), [9], source, source)


def test_picks_are_kept_without_a_full_record(tiny, tiny_ids):
    record = Record()
    tiny.full(tiny.at("highway"), tiny_ids, record)
    assert len(record.picks) == tiny.config.n_layers
    assert record.picks[0].shape == (56, tiny.config.top_k)
    assert not record.streams
    assert (np.diff(record.picks[0].numpy(), axis=1) > 0).all()


def test_matrices_are_named_as_the_pieces_of_a_slot():
    from protocol.files.slice_map import PIECES

    assert ExpertMatrices._fields == PIECES
