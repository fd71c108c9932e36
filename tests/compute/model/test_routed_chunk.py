"""A chunk's experts by kernels: the same numbers, however many launch together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compute.experts.device_cache import DeviceCache
from compute.model import routed_chunk
from compute.model.moe import Moe
from compute.model.routed_chunk import ChunkPlan, RoutedChunk
from compute.model.sequence import Sequence
from compute.model.sources import ExpertSource
from protocol.errors import ShardError
from tests.support.decode_rig import CONTEXT, close_rigs, demo, demo_model, make_rig
from tests.support.local_model import LocalModel
from tests.support.local_sources import LocalSources


@pytest.fixture
def launching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Moe, "_launches", lambda _moe, _x: True)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("wrong", [-1, 8, 99, -(2**31), 2**31 - 1])
def test_a_pick_that_is_no_expert_ends_the_chunk(device: str, wrong: int) -> None:
    picks = torch.tensor([[2, 5], [2, wrong], [0, 5]], dtype=torch.int32, device=device)
    weights = torch.ones((3, 2), device=device)
    with pytest.raises(ShardError, match="1 of a chunk's 6 picks are no experts"):
        _ = ChunkPlan(picks, weights, 8).counts


def test_a_plan_sorts_pairs_by_expert_then_token() -> None:
    picks = torch.tensor([[2, 5], [2, 7], [0, 5]], dtype=torch.int32)
    weights = torch.tensor([[0.2, 0.1], [0.3, 0.4], [0.6, 0.5]])
    plan = ChunkPlan(picks, weights, 8)
    assert plan.experts == [0, 2, 5, 7]
    assert plan.starts == [0, 1, 3, 5, 6]
    assert plan.tokens.tolist() == [2, 0, 1, 0, 2, 1]
    assert plan.weights.tolist() == pytest.approx([0.6, 0.2, 0.3, 0.1, 0.5, 0.4])
    assert plan.places.tolist() == [[1, 3], [2, 5], [0, 4]]


@pytest.mark.usefixtures("launching")
@pytest.mark.parametrize("precision", ["vendor", "highway", "wide"])
def test_launched_experts_give_the_logits_of_the_plain_path(
    tiny: LocalModel, tiny_ids: list[int], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.at(precision)
    launched = tiny.cut(model, tiny_ids, [40, 1, len(tiny_ids) - 41])
    for most in (1, 3):
        monkeypatch.setattr(routed_chunk, "MOST_COPIES", most)
        assert torch.equal(tiny.cut(model, tiny_ids, [40, 1, len(tiny_ids) - 41]), launched)
    monkeypatch.setattr(Moe, "_launches", lambda _moe, _x: False)
    plain = tiny.cut(model, tiny_ids, [40, 1, len(tiny_ids) - 41])
    assert torch.equal(launched.argmax(1), plain.argmax(1))
    assert (launched - plain).abs().max() < 0.3 * plain.std()


@pytest.mark.usefixtures("launching")
def test_chunks_of_eight_may_go_token_by_token(
    tiny: LocalModel, tiny_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_token: list[int] = []
    own = RoutedChunk._sums_by_token

    def noted(chunk: RoutedChunk, source: ExpertSource) -> Tensor:
        by_token.append(len(chunk._x))
        return own(chunk, source)

    monkeypatch.setattr(RoutedChunk, "_sums_by_token", noted)
    model = tiny.at("wide")
    wanted = tiny.cut(model, tiny_ids[:16], [8, 8])
    assert not by_token
    model.gemv_tokens = 7
    assert torch.equal(tiny.cut(model, tiny_ids[:16], [8, 8]), wanted)
    assert not by_token
    model.gemv_tokens = 8
    found = tiny.cut(model, tiny_ids[:16], [8, 8])
    assert by_token == [8] * 2 * model.config.n_layers
    assert torch.equal(found.argmax(1), wanted.argmax(1))
    assert (found - wanted).abs().max() < 0.3 * wanted.std()


@pytest.mark.usefixtures("launching")
def test_pieces_that_lie_otherwise_are_refused(tiny: LocalModel, tiny_ids: list[int]) -> None:
    source = LocalSources(tiny.checkpoint, reuse=True)  # each piece in memory of its own
    model = tiny.at("highway")
    with pytest.raises(ShardError, match=r"layer 0 expert .* laid out as"):
        model.forward(model.new_sequence(60), tiny_ids, source, source)


@pytest.mark.usefixtures("launching")
def test_experts_of_the_device_cache_are_not_given_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = some_ids(40)

    def chunk() -> tuple[Tensor, list[tuple[int, int]], int]:
        rig = make_rig("cpu", n_slots=demo().config.n_keys, n_device=40)
        for token in ids[:4]:
            rig.runner.step(token)
        sequence = Sequence(rig.model.config, CONTEXT, rig.model.device, rig.model.precision)
        before = rig.experts.io.hits_device
        rig.experts.begin_step()
        logits = rig.model.forward(sequence, ids, rig.experts, rig.experts, logits="all")
        picks = sorted((at, expert) for at, experts in rig.experts._picks for expert in experts)
        rig.experts.end_step()
        n_device = rig.experts.io.hits_device - before
        close_rigs()
        return logits, picks, n_device

    logits, picks, n_device = chunk()
    assert n_device > 10
    monkeypatch.setattr(routed_chunk, "ResidentSource", DeviceCache)  # no source is one
    streamed, same_picks, n_streamed = chunk()
    assert torch.equal(logits, streamed)
    assert (picks, n_device) == (same_picks, n_streamed)


def logits_on(
    device: str, precision: str, ids: list[int], sizes: list[int], gemv_tokens: int = 0
) -> Tensor:
    """Return the demo's logits of all ids, taken in by chunks of these sizes."""
    n_slots = demo().config.n_keys
    rig = make_rig(device, precision=precision, n_slots=n_slots, n_device=40, mode="eager")
    model = demo_model(device, precision)
    model.gemv_tokens = gemv_tokens
    sequence = Sequence(model.config, CONTEXT, model.device, model.precision)
    first, found = 0, []
    for size in sizes:
        rig.experts.begin_step()
        part = ids[first : first + size]
        found.append(model.forward(sequence, part, rig.experts, rig.experts, logits="all").cpu())
        rig.experts.end_step()
        first += size
    close_rigs()
    model.gemv_tokens = 0
    return torch.cat(found)


def some_ids(n: int) -> list[int]:
    return torch.randint(11, 4096, (n,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["vendor", "highway", "wide", "unrounded"])
@pytest.mark.parametrize("sizes", [[1, 2, 5, 8, 9], [33, 40], [500]])
def test_chunks_on_a_gpu_give_the_logits_of_the_cpu(precision: str, sizes: list[int]) -> None:
    ids = some_ids(sum(sizes))
    wanted = logits_on("cpu", precision, ids, sizes)
    found = logits_on("cuda", precision, ids, sizes)
    # Another order of summation moves values over a rounding's edge, by design of fp8, and may
    # choose another row or expert where two are as good.
    tolerance, share = (1e-3, 0.95) if precision == "unrounded" else (0.5, 0.75)
    near = (wanted - found).abs().amax(1) < tolerance * wanted.std()
    assert float(near.float().mean()) >= share
    assert float((wanted.argmax(1) == found.argmax(1)).float().mean()) >= share
    if precision != "unrounded":
        assert (wanted - found).abs().mean() < 0.05 * wanted.std()


@pytest.mark.gpu
@pytest.mark.parametrize("most", [1, 2, 1000])
def test_on_a_gpu_windows_change_no_bit(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = some_ids(200)
    wanted = logits_on("cuda", "highway", ids, [200])
    monkeypatch.setattr(routed_chunk, "MOST_COPIES", most)
    assert torch.equal(logits_on("cuda", "highway", ids, [200]), wanted)


@pytest.mark.gpu
def test_on_a_gpu_chunks_of_eight_may_go_token_by_token() -> None:
    ids = some_ids(24)
    wanted = logits_on("cuda", "highway", ids, [8, 8, 8])
    found = logits_on("cuda", "highway", ids, [8, 8, 8], gemv_tokens=8)
    assert float((found.argmax(1) == wanted.argmax(1)).float().mean()) >= 0.75
    assert (found - wanted).abs().mean() < 0.05 * wanted.std()
