"""Operators against the same formulas, written as loops in double precision."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.reference.attend import attend
from kernels.reference.engram_gate import engram_gate
from kernels.reference.fill_rows import fill_columns, fill_rows, rule
from kernels.reference.hc_collapse import hc_collapse, hc_collapse_norm
from kernels.reference.hc_expand import hc_expand
from kernels.reference.hc_mix import hc_mix
from kernels.reference.index_scores import index_scores
from kernels.reference.linear import grouped_linear, linear
from kernels.reference.pool_groups import pool_groups
from kernels.reference.rms_norm import rms_norm
from kernels.reference.rotate import rotate
from kernels.reference.route_select import route_select
from kernels.reference.select_blocks import select_blocks
from kernels.reference.select_rows import select_rows
from kernels.reference.swiglu import swiglu

F32, BF16 = torch.float32, torch.bfloat16
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(11)


def test_mixing_coefficients_follow_the_formula():
    T, S, H = 3, 4, 8
    streams, fn = torch.randn(T, S, H), torch.randn(24, S * H)
    scale, base = torch.rand(3), torch.randn(24)
    spread = torch.cat([scale[0].expand(4), scale[1].expand(4), scale[2].expand(16)])
    found = hc_mix(streams, fn, spread, base, n_iterations=20, hc_eps=1e-6, norm_eps=1e-20)
    for t in range(T):
        v = streams[t].flatten().double()
        m = fn.double() @ v / math.sqrt(float((v * v).mean()))
        pre = torch.sigmoid(m[:4] * scale[0] + base[:4]) + 1e-6
        post = 2 * torch.sigmoid(m[4:8] * scale[1] + base[4:8])
        c = (m[8:] * scale[2] + base[8:]).view(4, 4).exp()
        c = c / c.sum(1, keepdim=True) + 1e-6
        c = c / (c.sum(0, keepdim=True) + 1e-6)
        for _ in range(19):
            c = c / (c.sum(1, keepdim=True) + 1e-6)
            c = c / (c.sum(0, keepdim=True) + 1e-6)
        for got, wanted in zip(found, (pre, post, c), strict=True):
            assert torch.allclose(got[t].double(), wanted, atol=1e-5)
    assert torch.allclose(found[2].sum(1), torch.ones(T, 4), atol=1e-4)


def test_the_first_index_of_comb_is_the_summed_one():
    y, h = torch.zeros(1, 2), torch.tensor([[[1.0, 2.0], [10.0, 20.0]]])
    comb = torch.tensor([[[0.0, 1.0], [0.0, 0.0]]])  # stream 0 goes to stream 1
    out = hc_expand(y, h, torch.zeros(1, 2), comb)
    assert out.tolist() == [[[0.0, 0.0], [1.0, 2.0]]]
    with_y = hc_expand(torch.tensor([[4.0, 8.0]]), h, torch.tensor([[0.5, 0.0]]), comb)
    assert with_y.tolist() == [[[2.0, 4.0], [1.0, 2.0]]]
    assert hc_expand(y, h.to(BF16), torch.zeros(1, 2), comb).dtype == BF16


def test_collapse_weighs_the_streams():
    h = torch.tensor([[[1.0, 2.0], [10.0, 20.0]]])
    pre, weight = torch.tensor([[2.0, 0.5]]), torch.tensor([1.0, 3.0])
    assert hc_collapse(h, pre, F32).tolist() == [[7.0, 14.0]]
    inverse = 1 / math.sqrt((7**2 + 14**2) / 2 + 0.5)
    normed = hc_collapse_norm(h, pre, weight, 0.5, F32)[0].tolist()
    assert normed == pytest.approx([7 * inverse, 3 * 14 * inverse])


def test_the_norm_takes_its_weight_before_the_cast_and_survives_zeros():
    x = torch.randn(5, 16).to(BF16)
    weight = torch.rand(16) + 0.5
    v = x.double()
    wanted = weight * (v / (v * v).mean(1, keepdim=True).sqrt())
    assert torch.allclose(rms_norm(x, weight, 1e-20, F32).double(), wanted, atol=1e-5)
    assert torch.equal(rms_norm(x, weight, 1e-20, BF16), rms_norm(x, weight, 1e-20, F32).to(BF16))
    assert rms_norm(torch.zeros(1, 16), weight, 1e-20, F32).abs().max() == 0


def test_rotation_turns_the_last_channels_in_adjacent_pairs():
    x = torch.tensor([[7.0, 8.0, 1.0, 0.0, 0.0, 1.0]])
    turns = torch.tensor([[1j, 1j]], dtype=torch.complex64)
    assert rotate(x, turns).tolist() == [[7.0, 8.0, 0.0, 1.0, -1.0, 0.0]]
    heads = torch.randn(3, 2, 8)
    some = torch.polar(torch.ones(3, 2), torch.randn(3, 2))
    assert torch.allclose(rotate(rotate(heads, some), some.conj()), heads, atol=1e-6)


def test_attention_follows_the_formula_and_the_sink_takes_its_share():
    T, H, k, N = 4, 2, 32, 6
    q, rows, sink = torch.randn(T, H, k), torch.randn(N, k), torch.randn(H)
    visible = torch.rand(T, N) < 0.5
    visible[:, 0] = True
    out = attend(q, rows, sink, visible, F32)
    for t in range(T):
        for h in range(H):
            keys = rows[visible[t]].double()
            e = (keys @ q[t, h].double() * k**-0.5).exp()
            wanted = (e[:, None] * keys).sum(0) / (e.sum() + sink[h].double().exp())
            assert torch.allclose(out[t, h].double(), wanted, atol=1e-5)
    alone = attend(q[:1], rows[visible[0]], sink, None, F32)
    assert torch.equal(alone, out[:1])


def test_large_scores_do_not_overflow():
    q = torch.full((1, 1, 4), 1e4)
    assert attend(q, torch.full((2, 4), 1e4), torch.zeros(1), None, F32).tolist() == [[[1e4] * 4]]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 9, 11, 12, 15, 16, 40])
@pytest.mark.parametrize("k", [64, 512, 2048])
def test_a_rows_product_does_not_depend_on_its_neighbours(n, k):
    x, weight = torch.randn(40, k), torch.randn(48, k)
    assert torch.equal(linear(x[:n], weight, F32), linear(x, weight, F32)[:n])
    groups, matrices = torch.randn(40, 2, k), torch.randn(2, 16, k)
    assert torch.equal(
        grouped_linear(groups[:n], matrices, F32), grouped_linear(groups, matrices, F32)[:n]
    )
    queries, keys, weights = torch.randn(40, 2, k), torch.randn(50, k), torch.randn(40, 2)
    scores = index_scores(queries, keys, weights)
    assert torch.equal(index_scores(queries[:n], keys, weights[:n]), scores[:n])


@pytest.mark.parametrize(
    ("unlike", "lengths"),
    [
        (set(), {1: 1, 3: 3, 12: 12}),
        ({1, 2, 3, 5, 6, 7, 9, 10, 11}, {1: 4, 4: 4, 5: 8, 11: 12, 13: 13}),
        (set(range(1, 16)), {1: 16, 5: 16, 15: 16, 16: 16, 17: 17}),
        (set(range(1, 24)), {1: 16, 17: 17}),
    ],
)
def test_rows_are_filled_up_to_numbers_whose_products_are_alike(monkeypatch, unlike, lengths):
    rule.cache_clear()
    monkeypatch.setattr("kernels.reference.fill_rows.unlike_numbers", lambda: frozenset(unlike))
    try:
        for n_rows, n_filled in lengths.items():
            x = torch.randn(n_rows, 3)
            filled = fill_rows(x)
            assert len(filled) == n_filled
            assert torch.equal(filled[:n_rows], x)
    finally:
        rule.cache_clear()


WITHOUT_STRICT_SUMS = """
import torch
from kernels.reference.fill_rows import rule, unlike_numbers
from kernels.reference.linear import linear
step, many = rule()
if unlike_numbers() & set(range(16, 24)):
    print("no rule holds")
x, weight = torch.randn(40, 512), torch.randn(48, 512)
whole = linear(x, weight, torch.float32)
same = [torch.equal(linear(x[:n], weight, torch.float32), whole[:n]) for n in range(1, 40)]
print(f"{all(same)}: a multiple of {step} below {many}")
"""


def test_where_the_library_keeps_to_no_order_the_rows_that_are_added_do():
    environment = os.environ | {"MKL_CBWR": "AUTO"}
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT_STRICT_SUMS],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    if "no rule" in found:
        pytest.skip("this processor's products differ at every number of rows")
    assert found.startswith("True"), found


def test_filled_columns_are_zeros_after_the_true_ones():
    x = torch.randn(3, 5)
    filled = fill_columns(x)
    assert filled.shape == (3, 32)
    assert torch.equal(filled[:, :5], x)
    assert filled[:, 5:].abs().max() == 0
    whole = torch.randn(2, 64)
    assert fill_columns(whole) is whole


def test_pooling_is_a_softmax_for_each_channel():
    kv = torch.tensor([[[1.0, 1.0], [3.0, 5.0]]])
    scores = torch.tensor([[[0.0, 100.0], [0.0, 0.0]]])
    assert pool_groups(kv, scores).tolist() == [[2.0, 1.0]]


def test_index_scores_add_the_weighted_relus():
    queries, keys, weights = torch.randn(3, 2, 8), torch.randn(5, 8), torch.randn(3, 2)
    wanted = torch.einsum("thk,gk->thg", queries.double(), keys.double()).relu()
    wanted = (wanted * weights.double()[..., None]).sum(1)
    assert torch.allclose(index_scores(queries, keys, weights).double(), wanted, atol=1e-5)
    rounded = index_scores(queries, keys, weights.to(BF16))
    assert torch.equal(rounded, rounded.to(BF16).float())


def test_rows_are_chosen_by_score_then_by_the_lower_number():
    scores = torch.tensor([[1.0, 5.0, 5.0, 5.0, 0.0], [5.0, 5.0, 5.0, 5.0, 5.0]])
    chosen = select_rows(scores, torch.tensor([5, 2]), 3)
    assert chosen.tolist() == [[1, 2, 3], [0, 1, -1]]


def test_nan_scores_rank_last_and_hidden_rows_are_never_named():
    scores = torch.tensor([[torch.nan, 1.0, -torch.inf, 9.0]])
    assert select_rows(scores, torch.tensor([3]), 1).tolist() == [[1]]
    assert select_rows(scores, torch.tensor([3]), 4).tolist() == [[0, 1, 2, -1]]
    assert select_rows(scores, torch.tensor([0]), 2).tolist() == [[-1, -1]]


def test_blocks_keep_the_newest_and_the_best():
    scores = torch.tensor([[9.0, 0.0, 1.0, 0.0, 0.0, 7.0, 0.0, 0.0, 3.0]])
    kept = select_blocks(scores, torch.tensor([9]), 2, 3)
    assert kept.tolist() == [[True, False, True, False, True]]
    early = select_blocks(scores, torch.tensor([3]), 2, 3)
    assert early.tolist() == [[True, True, False, False, False]]
    ties = select_blocks(torch.zeros(1, 8), torch.tensor([8]), 2, 2)
    assert ties.tolist() == [[True, False, False, True]]


def test_picks_rank_by_biased_score_but_weigh_the_plain_one():
    logits = torch.tensor([[2.0, 1.0, 1.0, 30.0]])
    picks, weights = route_select(logits, torch.tensor([0.0, 0.0, 0.0, -100.0]), 2, 1.5)
    assert picks.tolist() == [[0, 1]]
    a, b = (math.sqrt(math.log1p(math.exp(x))) for x in (2.0, 1.0))
    assert weights[0].tolist() == pytest.approx([1.5 * a / (a + b), 1.5 * b / (a + b)])


def test_equal_keys_go_to_the_lower_expert_and_nan_ranks_last():
    picks, _ = route_select(torch.zeros(1, 40), torch.zeros(40), 3, 1.0)
    assert picks.tolist() == [[0, 1, 2]]
    logits = torch.tensor([[torch.nan, -50.0, torch.nan, 0.0]])
    assert route_select(logits, torch.zeros(4), 3, 1.0)[0].tolist() == [[3, 1, 0]]


def test_swiglu_clamps_the_gate_above_only_and_the_up_side_both_ways():
    gate, up = torch.tensor([[50.0, -50.0, 1.0]]), torch.tensor([[50.0, 1.0, -50.0]])

    def silu(x):
        return x / (1 + math.exp(-x))

    wanted = [silu(10) * 10, silu(-50), silu(1) * -10]
    assert swiglu(gate, up, 10.0, None)[0].tolist() == pytest.approx(wanted)
    half = swiglu(gate, up, 10.0, torch.tensor([0.5]))[0].tolist()
    assert half == pytest.approx([0.5 * w for w in wanted])


def test_the_engram_gate_takes_the_root_of_the_agreement():
    S, H = 2, 8
    streams, keys = torch.randn(1, S, H), torch.randn(1, S, H)
    value, weight = torch.randn(1, H), torch.rand(S, H)
    out = engram_gate(streams, keys, value, weight, 1e-20)
    for s in range(S):
        h, k = streams[0, s].double(), keys[0, s].double()
        dot = float((h * weight[s] * k).sum()) / math.sqrt(float((h * h).mean()))
        dot /= math.sqrt(float((k * k).mean())) * math.sqrt(H)
        root = math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot)
        wanted = h + value[0].double() / (1 + math.exp(-root))
        assert torch.allclose(out[0, s].double(), wanted, atol=1e-5)
