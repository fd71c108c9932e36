"""The router on the device: picks, weights, header and pointers equal the host's, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.reference import route_m1 as reference
from kernels.reference.compare_routes import compare_routes
from kernels.reference.route_select import route_select
from kernels.route_m1 import route_m1, route_rows
from tests.support.row_cases import rows_on

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
SIZES = [(384, 6), (8, 2), (5, 5), (33, 1), (129, 3), (1000, 16), (1024, 8), (1024, 16)]
OFFSETS = (0, 5_898_240, 1 << 33)
N_SLOTS = 37
launch: Any = route_m1  # arguments are unpacked


def case(n_tokens: int, n_experts: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits of many sizes, with ties, and a bias that turns some ranks round."""
    generator = torch.Generator().manual_seed(seed * 1000 + n_experts)
    logits = torch.randn(n_tokens, n_experts, generator=generator) * 8
    logits[:, ::3] = (logits[:, ::3] * 2).round() / 2
    bias = (torch.randn(n_experts, generator=generator) * 4).round() / 4
    return logits, bias


def slots_of(n_experts: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(-12, N_SLOTS, (n_experts,), generator=generator, dtype=torch.int32)
    return table.clamp_(min=-1), torch.arange(N_SLOTS) * 20_000_768 + (1 << 45)


def poisoned(top_k: int, device: str) -> Any:
    return {
        "header": torch.full((1 + 3 * top_k,), 77_777, dtype=torch.int32, device=device),
        "pointers": torch.full((3, top_k), 77_777, dtype=torch.int64, device=device),
        "weights": torch.full((top_k,), float("nan"), device=device),
    }


def agree(device: str, logits: Tensor, bias: Tensor, table: Tensor, top_k: int) -> Tensor:
    """Hold the kernel to the host's chain; returns the header."""
    _, addresses = slots_of(1)
    settings: Any = {"top_k": top_k, "routed_scale": 1.5}
    wanted = reference.route_m1(logits, bias, table, addresses, OFFSETS, **settings)
    found = launch(
        *(t.to(device) for t in (logits, bias, table, addresses)), OFFSETS,
        **settings, **poisoned(top_k, device),
    )  # fmt: skip
    assert compare_routes(3, found[0], wanted[0], found[1], wanted[1]) is None
    bits = found[2].cpu().view(torch.int32)
    assert torch.equal(bits, found[0].cpu()[1 + top_k : 1 + 2 * top_k])
    return found[0].cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("n_experts", "top_k"), SIZES)
def test_decisions_equal_the_hosts(device: str, n_experts: int, top_k: int) -> None:
    for seed in range(1 if device == "cpu" else 40):
        logits, bias = case(1, n_experts, seed=seed)
        header = agree(device, logits, bias, slots_of(n_experts, seed)[0], top_k)
        picks = header[1 : 1 + top_k].tolist()
        assert picks == sorted(set(picks))
        assert header[0] == (header[1 + 2 * top_k :] == -1).sum()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("n_experts", "top_k"), SIZES)
def test_rows_equal_the_hosts(device: str, n_experts: int, top_k: int) -> None:
    whole = device == "cuda" or n_experts == 33  # a program takes long under the interpreter
    for n_tokens in (0, *rows_on(device)) if whole else (2,):
        logits, bias = case(n_tokens, n_experts)
        wanted = reference.route_rows(logits, bias, top_k=top_k, routed_scale=2.5)
        outs: Any = {
            "picks": torch.full((n_tokens, top_k), -7, dtype=torch.int32, device=device),
            "weights": torch.full((n_tokens, top_k), float("nan"), device=device),
        }
        found = route_rows(
            logits.to(device), bias.to(device), top_k=top_k, routed_scale=2.5, **outs
        )
        assert torch.equal(found[0].cpu(), wanted[0])
        assert torch.equal(found[1].cpu().view(torch.int32), wanted[1].view(torch.int32))


@pytest.mark.parametrize("device", DEVICES)
def test_equal_scores_go_to_the_lower_experts(device: str) -> None:
    header = agree(device, torch.zeros(1, 384), torch.zeros(384), slots_of(384)[0], 6)
    assert header[1:7].tolist() == [0, 1, 2, 3, 4, 5]
    logits = torch.full((1, 300), 100.0)  # one row of a warp ends between equals
    logits[0, :125] = 1.0
    header = agree(device, logits, torch.zeros(300), slots_of(300)[0], 6)
    assert header[1:7].tolist() == [125, 126, 127, 128, 129, 130]


@pytest.mark.parametrize("device", DEVICES)
def test_nan_ranks_below_minus_infinity_and_zeros_are_equal(device: str) -> None:
    logits, bias = torch.zeros(1, 8), torch.zeros(8)
    logits[0, 0], logits[0, 1], bias[2] = float("nan"), float("-inf"), float("-inf")
    bias[3] = -0.0
    assert agree(device, logits, bias, slots_of(8)[0], 6)[1:7].tolist() == [1, 3, 4, 5, 6, 7]
    assert agree(device, logits, bias, slots_of(8)[0], 7)[1:8].tolist() == [1, 2, 3, 4, 5, 6, 7]
    agree(device, logits, bias, slots_of(8)[0], 8)
    agree(device, torch.full((1, 256), float("nan")), torch.zeros(256), slots_of(256)[0], 16)
    zeros = torch.full((1, 8), float("-inf"))  # scores of zero, and a bias that keeps its sign
    zero_bias = torch.tensor([-0.0, 0.0] * 4)
    assert agree(device, zeros, zero_bias, slots_of(8)[0], 3)[1:4].tolist() == [0, 1, 2]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinity over itself, when interpreted
@pytest.mark.parametrize("device", DEVICES)
def test_extreme_logits_give_the_hosts_bits(device: str) -> None:
    values = [0.0, -0.0, 20.0, 20.000002, 1e-45, -1e-45, 88.8, -87.4, -103.5, -104.1, 3e38, -3e38]
    logits = torch.tensor([[*values, float("inf"), float("-inf"), 1e-8, -16.7]])
    agree(device, logits, torch.zeros(16), slots_of(16)[0], 16)
    agree(device, logits[:, :12].contiguous(), torch.zeros(12), slots_of(12)[0], 12)
    agree(device, torch.full((1, 64), -103.5), torch.zeros(64), slots_of(64)[0], 6)


@pytest.mark.parametrize("device", DEVICES)
def test_absent_picks_have_no_address_and_are_counted(device: str) -> None:
    logits, bias = case(1, 384)
    _, addresses = slots_of(384)
    settings: Any = {"top_k": 6, "routed_scale": 1.5}
    for slot, n_absent in (
        (-1, 6),
        (N_SLOTS, 6),
        (-5, 6),
        (2**31 - 1, 6),
        (0, 0),
        (N_SLOTS - 1, 0),
    ):
        table = torch.full((384,), slot, dtype=torch.int32)
        assert agree(device, logits, bias, table, 6)[0] == n_absent
        tensors = (logits.to(device), bias.to(device), table.to(device), addresses.to(device))
        pointers = launch(*tensors, OFFSETS, **settings)[1].cpu()
        base = 0 if n_absent else int(addresses[slot])
        wanted = torch.tensor([0 if n_absent else base + o for o in OFFSETS])
        assert torch.equal(pointers, wanted[:, None].expand(3, 6))


def test_plan_order_keeps_each_weight_with_its_pick() -> None:
    logits, bias = case(4, 60)
    ranked, weighed = route_select(logits, bias, 4, 1.5)
    picks, weights = reference.route_rows(logits, bias, top_k=4, routed_scale=1.5)
    for token in range(4):
        pairs = zip(ranked[token].tolist(), weighed[token].tolist(), strict=True)
        assert sorted(pairs) == list(
            zip(picks[token].tolist(), weights[token].tolist(), strict=True)
        )


def test_the_first_difference_is_named() -> None:
    logits, bias = case(1, 60)
    table, addresses = slots_of(60)
    header, pointers, _ = reference.route_m1(
        logits, bias, table, addresses, OFFSETS, top_k=4, routed_scale=1.5
    )
    assert compare_routes(0, header, header.clone(), pointers, pointers.clone()) is None
    said = {}
    for word in (0, 2, 6, 11):
        other = header.clone()
        other[word] += 1
        said[word] = str(compare_routes(7, other, header))
        assert said[word].startswith("layer 7: ")
    assert f"pick 1 of the plan is {int(header[2]) + 1}, wanted {int(header[2])}" in said[2]
    assert "weight bits 1 of the plan is 0x" in said[6]
    assert "slot 2 of the plan" in said[11]
    assert "number of absent picks is" in said[0]
    moved = pointers.clone()
    moved[2, 3] += 8
    assert "down pointer 3 of the plan is 0x" in str(
        compare_routes(7, header, header, moved, pointers)
    )
    nan, other_nan = header.clone(), header.clone()
    nan[5], other_nan[5] = 0x7FFFFFFF, -0x400000
    assert compare_routes(7, nan, other_nan) is None


def test_sizes_beyond_the_limits_are_refused() -> None:
    table, addresses = slots_of(1)

    def route(n_experts: int, top_k: int, n_rows: int = 1, **outs: Any) -> None:
        route_m1(
            torch.zeros(n_rows, n_experts), torch.zeros(n_experts),
            table.expand(n_experts).contiguous(), addresses, OFFSETS,
            top_k=top_k, routed_scale=1.0, **outs,
        )  # fmt: skip

    for n_experts, top_k in ((1025, 6), (384, 17), (4, 5), (8, 0)):
        with pytest.raises(ValueError, match="route_m1"):
            route(n_experts, top_k)
        with pytest.raises(ValueError, match="route_rows"):
            route_rows(
                torch.zeros(2, n_experts), torch.zeros(n_experts), top_k=top_k, routed_scale=1.0
            )
    with pytest.raises(ValueError, match="2 rows of logits"):
        route(8, 2, 2)
    with pytest.raises(ValueError, match="header"):
        route(8, 2, header=torch.zeros(8, dtype=torch.int32))
    with pytest.raises(ValueError, match="pointers"):
        route(8, 2, pointers=torch.zeros(3, 2, dtype=torch.int32))
    route(8, 2)


@pytest.mark.gpu
def test_a_replayed_graph_decides_anew_with_the_same_bits() -> None:
    table, addresses = slots_of(384)
    logits, bias = torch.zeros(1, 384, device="cuda"), case(1, 384)[1]
    outs = poisoned(6, "cuda")
    settings: Any = {"top_k": 6, "routed_scale": 1.5}
    tensors = (bias.cuda(), table.cuda(), addresses.cuda())
    launch(logits, *tensors, OFFSETS, **settings, **outs)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(logits, *tensors, OFFSETS, **settings, **outs)
    for seed in range(50):
        fresh = case(1, 384, seed=seed)[0]
        logits.copy_(fresh)
        tensors[1].copy_(slots_of(384, seed)[0])
        graph.replay()
        wanted = reference.route_m1(
            fresh, bias, slots_of(384, seed)[0], addresses, OFFSETS, **settings
        )
        assert compare_routes(0, outs["header"], wanted[0], outs["pointers"], wanted[1]) is None
