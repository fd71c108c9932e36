"""A chunk's routing held to the host's, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from compute.experts.device_experts import DeviceExperts
from compute.graph.decoding import Decoding, GraphSettings
from compute.model.chunk_check import ChunkCheck
from compute.model.moe import Moe
from compute.model.routed_chunk import RoutedChunk
from compute.model.sources import ExpertMatrices, Resident
from protocol.errors import ShardError
from tests.support.decode_rig import Rig, close_rigs, make_rig

PROMPT = [3, 911, 17, 2045, 88]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
N_LAYERS = 8
LAYER, TOKEN = 5, 2


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    close_rigs()


def decoding(made: Rig, *, checks: bool) -> Decoding:
    return Decoding(made.model, made.experts, 512, GraphSettings("eager", checks=checks))


def forward(made: Rig, own: Decoding) -> Tensor:
    sequence = own.new_sequence()
    made.experts.begin_step()
    made.model.forward(sequence, [7, 8], made.experts, made.experts)
    found = made.model.forward(sequence, PROMPT, made.experts, made.experts)
    made.experts.end_step()
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_every_token_of_a_prompt_is_compared_and_no_byte_changes(device: str) -> None:
    made = make_rig(device, n_device=20)
    plain = forward(made, decoding(made, checks=False))
    own = decoding(made, checks=True)
    try:
        assert torch.equal(forward(made, own), plain)
    finally:
        decoding(made, checks=False)
    assert own.values()["graph_routes_checked"] == N_LAYERS * (2 + len(PROMPT))
    assert made.model.checks is None


def _other_pick(picks: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    picks[TOKEN, 0] = next(e for e in range(32) if e not in picks[TOKEN].tolist())
    return picks, weights


def _other_weight(picks: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    weights[TOKEN].view(torch.int32)[3] += 1
    return picks, weights


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_other_pick, r"position 4: .* layer 5: pick \d of the plan is \d+, wanted \d+"),
        (_other_weight, r"position 4: .* layer 5: weight bits \d of the plan is 0x\w+, wanted 0x"),
    ],
)
def test_a_decision_that_differs_ends_the_prompt(
    device: str, spoil: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_rig(device)
    picked = Moe._picked

    def spoiled(self: Moe, logits: Tensor) -> tuple[Tensor, Tensor]:
        found = picked(self, logits)
        return spoil(*found) if self.layer == LAYER and len(logits) > 2 else found  # type: ignore[operator]

    monkeypatch.setattr(Moe, "_picked", spoiled)
    own = decoding(made, checks=True)
    try:
        with pytest.raises(ShardError, match=said):
            forward(made, own)
    finally:
        decoding(made, checks=False)


@pytest.mark.parametrize("device", DEVICES)
def test_a_plan_that_differs_ends_the_prompt(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_rig(device)
    planned = Moe._planned

    def spoiled(self: Moe, row: object, picks: Tensor, weights: Tensor) -> object:
        plan = planned(self, row, picks, weights)  # type: ignore[arg-type]
        if self.layer == LAYER:
            (plan.weights if isinstance(plan.weights, Tensor) else plan.weights[1])[0] *= 2
        return plan

    monkeypatch.setattr(Moe, "_planned", spoiled)
    own = decoding(made, checks=True)
    try:
        said = r"chunk from position 0: .* layer 5: weight bits of pair \d+ is 0x\w+, wanted 0x"
        with pytest.raises(ShardError, match=said):
            forward(made, own)
    finally:
        decoding(made, checks=False)


def swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one layer's kernels be given each other's experts of the device cache."""
    resident = DeviceExperts.resident

    def spoiled(self: DeviceExperts, layer: int, experts: list[int]) -> Resident:
        found = resident(self, layer, experts)
        places = np.flatnonzero(found.starts)
        if layer == LAYER:
            found.starts[places] = np.roll(found.starts[places], 1)
        return found

    monkeypatch.setattr(DeviceExperts, "resident", spoiled)


def shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one layer's first expert be the second one's copy."""
    hold = RoutedChunk._hold

    def spoiled(self: RoutedChunk, place: int, expert: int, m: ExpertMatrices) -> None:
        if self._layer == LAYER and place == 1:
            hold(self, 0, expert, m)
        hold(self, place, expert, m)

    monkeypatch.setattr(RoutedChunk, "_hold", spoiled)


def sent_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one layer's addresses arrive otherwise than they were sent."""
    pointers = RoutedChunk._pointers

    def spoiled(self: RoutedChunk, end: int) -> Tensor:
        return pointers(self, end) + (self._layer == LAYER)

    monkeypatch.setattr(RoutedChunk, "_pointers", spoiled)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gemv_tokens", [0, 8], ids=["grouped", "token by token"])
@pytest.mark.parametrize(
    ("spoil", "n_device"), [(None, 100), (swapped, 100), (shifted, 0), (sent_wrong, 0)]
)
def test_an_address_of_another_expert_ends_the_prompt(
    device: str,
    gemv_tokens: int,
    spoil: Callable[[pytest.MonkeyPatch], None] | None,
    n_device: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device == "cpu":
        monkeypatch.setattr(Moe, "_launches", lambda _moe, _x: True)
    made = make_rig(device, n_device=n_device)
    made.greedy(6)  # they bring experts to the device cache
    made.runner.finish()
    made.experts.begin_copies()
    made.experts._copies.finish()
    if spoil is not None:
        spoil(monkeypatch)
    own = decoding(made, checks=True)
    made.model.gemv_tokens = gemv_tokens
    try:
        if spoil is None:
            forward(made, own)
            return
        said = r"a chunk: .* layer 5: gate pointer of expert \d+ is 0x\w+, wanted 0x\w+"
        with pytest.raises(ShardError, match=said):
            forward(made, own)
    finally:
        made.model.gemv_tokens = 0
        decoding(made, checks=False)


def test_addresses_are_compared_one_by_one() -> None:
    own = torch.tensor([[16, 32], [48, 64], [80, 96]])
    ChunkCheck.pointers(3, [4, 9], own.clone(), own)
    given = own.clone()
    given[2, 1] = 97
    with pytest.raises(ShardError, match="layer 3: down pointer of expert 9 is 0x61, wanted 0x60"):
        ChunkCheck.pointers(3, [4, 9], given, own)


def test_two_weights_that_are_no_numbers_are_equal_and_unequal_lengths_differ() -> None:
    counted: list[int] = []
    check = ChunkCheck(counted.append)
    logits = torch.full((1, 4), torch.nan)
    given = (logits, torch.zeros(4), 1.0)
    picks = torch.tensor([[0, 1]])
    weights = torch.tensor([[-1, 0x7FC00001]], dtype=torch.int32).view(torch.float32)
    tokens = torch.zeros(2, dtype=torch.int64)
    check.routes(0, 0, *given, picks, weights, (tokens, weights.flatten(), [1, 1, 0, 0]))
    assert counted == [1]
    with pytest.raises(ShardError, match="token of pair 0 is one of 1, wanted 2"):
        check.routes(0, 0, *given, picks, weights, (tokens[:1], weights.flatten(), [1, 1, 0, 0]))
