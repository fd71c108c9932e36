"""Selections of rows and of candidate blocks: kernels against their references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import top_keys
from kernels.reference import select_blocks as reference_blocks
from kernels.reference import select_rows as reference_rows
from kernels.select_blocks import select_blocks
from kernels.select_rows import select_rows
from tests.support.row_cases import apart, row_cases

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
F32, BF16 = torch.float32, torch.bfloat16
KINDS = ["normal", "ties", "one value", "odd values", "narrow"]
POISON = 3e38


def scores_of(kind: str, n_tokens: int, n_rows: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(n_tokens * n_rows)
    scores = torch.randn(n_tokens, n_rows, generator=generator)
    if kind == "ties":
        scores = (scores * 2).round() / 2 * torch.tensor([-1.0, 1.0])[torch.arange(n_rows) % 2]
    elif kind == "one value":
        scores = torch.full_like(scores, -0.25)
    elif kind == "odd values":
        special = torch.tensor([float("nan"), torch.inf, -torch.inf, 0.0, -0.0, 1.0, -float("nan")])
        pick = torch.randint(0, 7, scores.shape, generator=generator)
        scores = torch.where(pick < 5, special[pick], scores)
    elif kind == "narrow":
        scores = 1 + scores * 1e-6
    return scores.to(dtype).float()


def seen_by(first: int, n_tokens: int, ratio: int, n_rows: int) -> Tensor:
    return ((first + 1 + torch.arange(n_tokens)) // ratio).clamp(max=n_rows)


def chosen_rows(scores: Tensor, visible: Tensor, top_k: int) -> Tensor:
    found = reference_rows.select_rows(scores, visible, top_k)
    return torch.nn.functional.pad(found, (0, top_k - found.shape[1]), value=-1).int()


@pytest.fixture(params=["one launch", "several launches"])
def _slices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "several launches":
        monkeypatch.setattr(top_keys, "LEAST_SLICE", 32)
        monkeypatch.setattr(top_keys, "LARGEST_SLICE", 64)


@pytest.mark.usefixtures("_slices")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("n_tokens", "first", "ratio", "n_rows", "top_k", "dtype"),
    [
        (1, 500, 2, 300, 9, F32),
        (2, 150, 1, 163, 16, BF16),
        (1, 20, 2, 500, 16, BF16),
        (4, 13, 1, 20, 16, F32),
    ],
)
def test_rows_equal_the_reference(
    device: str, kind: str, n_tokens: int, first: int, ratio: int, n_rows: int, top_k: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    scores = scores_of(kind, n_tokens, n_rows, dtype)
    visible = seen_by(first, n_tokens, ratio, n_rows)
    wanted = chosen_rows(scores, visible, top_k)
    seen = torch.arange(n_rows) < visible.unsqueeze(1)
    poisoned = apart(torch.where(seen, scores, POISON), device)
    found = torch.full((n_tokens, top_k), 12345, dtype=torch.int32).to(device)
    at = torch.tensor([first]).to(device)
    select_rows(poisoned, at, ratio, top_k, dtype=dtype, selection=found)
    assert torch.equal(found.cpu(), wanted)


@pytest.mark.usefixtures("_slices")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["ties", "odd values"])
@pytest.mark.parametrize("share", [0.0, 0.03, 0.5])
def test_rows_of_dropped_blocks_rank_last(device: str, kind: str, share: float) -> None:
    n_tokens, n_rows, top_k, size = 2, 403, 16, 8
    scores = scores_of(kind, n_tokens, n_rows, BF16)
    kept = torch.rand(n_tokens, 51, generator=torch.Generator().manual_seed(1)) < share
    masked = scores.masked_fill(~kept.repeat_interleave(size, 1)[:, :n_rows], -torch.inf)
    wanted = chosen_rows(masked, seen_by(600, n_tokens, 1, n_rows), top_k)
    found = select_rows(
        scores.to(device), torch.tensor([600]).to(device), 1, top_k,
        blocks=kept.byte().to(device), block_size=size, dtype=BF16,
    )  # fmt: skip
    assert torch.equal(found.cpu(), wanted)


@pytest.mark.usefixtures("_slices")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("n_tokens", "first", "ratio", "n_rows", "top"),
    [(1, 2000, 2, 999, 9), (3, 125, 1, 700, 16)],
)
def test_blocks_equal_the_reference(
    device: str, kind: str, n_tokens: int, first: int, ratio: int, n_rows: int, top: int
) -> None:
    size = 8
    scores = scores_of(kind, n_tokens, n_rows, F32)
    visible = seen_by(first, n_tokens, ratio, n_rows).unsqueeze(1)
    wanted = reference_blocks.select_blocks(scores, visible[:, 0], size, top)
    n_visible = (visible + size - 1) // size
    wanted = torch.where(n_visible <= top, torch.arange(wanted.shape[1]) < n_visible, wanted)
    scores = torch.where(torch.arange(n_rows) < visible, scores, POISON)
    kept = torch.full(wanted.shape, 77, dtype=torch.uint8).to(device)
    at = torch.tensor([first]).to(device)
    select_blocks(apart(scores, device), at, ratio, size, top, kept=kept)
    assert torch.equal(kept.cpu(), wanted.byte())


@pytest.mark.parametrize("device", DEVICES)
def test_scores_are_not_read_where_all_is_selected(device: str) -> None:
    scores = torch.full((2, 64), float("nan")).to(device)
    first = torch.tensor([9]).to(device)
    found = select_rows(scores, first, 1, 32)
    assert found[0].tolist() == [*range(10), *[-1] * 22]
    assert found[1].tolist() == [*range(11), *[-1] * 21]
    assert select_blocks(scores, first, 1, 8, 2).tolist() == [[1, 1, *[0] * 6]] * 2


def test_on_the_host_the_references_answer() -> None:
    scores = scores_of("ties", 3, 90, BF16)
    visible = seen_by(70, 3, 1, 90)
    found = select_rows(scores, torch.tensor([70]), 1, 16)
    assert torch.equal(found, chosen_rows(scores, visible, 16))
    assert select_rows(scores, torch.tensor([70]), 1, 100)[:, 73:].eq(-1).all()
    kept = select_blocks(scores, torch.tensor([70]), 1, 8, 4)
    assert torch.equal(kept, reference_blocks.select_blocks(scores, visible, 8, 4).byte())


def test_a_plan_ends_in_one_slice() -> None:
    for n, top, launches in ((1 << 20, 512, 3), (65536, 512, 2), (512, 512, 1), (131072, 2048, 2)):
        plan = top_keys.Narrowing.plan(n, top)
        assert plan.widths[-1] <= plan.slice
        assert len(plan.widths) == launches


def test_shapes_that_differ_are_refused() -> None:
    scores, first = torch.zeros(1, 40), torch.tensor([0])
    with pytest.raises(ValueError, match="at most 8192"):
        select_rows(scores, first, 1, 9000)
    with pytest.raises(ValueError, match="blocks"):
        select_rows(scores, first, 1, 4, blocks=torch.zeros(1, 4).byte(), block_size=8)
    with pytest.raises(ValueError, match="kept"):
        select_blocks(scores, first, 1, 8, 4, kept=torch.zeros(1, 4).byte())


@pytest.mark.parametrize(("device", "n_tokens"), row_cases())
def test_any_number_of_tokens_selects_as_the_reference(device: str, n_tokens: int) -> None:
    n_rows, first, top = 75, 50, 5
    scores = scores_of("ties", n_tokens, n_rows, BF16)
    visible = seen_by(first, n_tokens, 1, n_rows)
    at, there = torch.tensor([first]).to(device), apart(scores, device)
    found = select_rows(there, at, 1, top, dtype=BF16)
    assert torch.equal(found.cpu(), chosen_rows(scores, visible, top))
    kept = select_blocks(there, at, 1, 8, top, dtype=BF16)
    assert torch.equal(kept.cpu(), reference_blocks.select_blocks(scores, visible, 8, top).byte())


@pytest.mark.gpu
@pytest.mark.parametrize("n_tokens", [1, 2, 7, 33])
@pytest.mark.parametrize("n_rows", [4097, 65536, 1_000_001])
@pytest.mark.parametrize("kind", KINDS)
def test_large_selections_equal_the_reference(n_tokens: int, n_rows: int, kind: str) -> None:
    if n_tokens > 7 and n_rows > 65536:
        pytest.skip("one size is enough")
    scores = scores_of(kind, n_tokens, n_rows, BF16).cuda()
    for first in (n_rows // 2, n_rows - n_tokens):
        visible = seen_by(first, n_tokens, 1, n_rows)
        at = torch.tensor([first]).cuda()
        wanted = chosen_rows(scores.cpu(), visible, 512)
        for dtype in (F32, BF16):
            found = select_rows(scores, at, 1, 512, dtype=dtype)
            assert torch.equal(found.cpu(), wanted)
        kept = select_blocks(scores, at, 1, 8, 2048, dtype=BF16)
        if int(visible[0]) > 8 * 2048:
            blocks = reference_blocks.select_blocks(scores.cpu(), visible, 8, 2048)
            assert torch.equal(kept.cpu(), blocks.byte())


@pytest.mark.gpu
def test_a_replayed_graph_selects_by_the_position_it_finds() -> None:
    scores = scores_of("ties", 1, 70000, BF16).cuda()
    first = torch.tensor([100]).cuda()
    selection = torch.empty(1, 512, dtype=torch.int32).cuda()
    kept = torch.empty(1, 8750, dtype=torch.uint8).cuda()

    def launch() -> Any:
        select_rows(scores, first, 1, 512, dtype=BF16, selection=selection)
        select_blocks(scores, first, 1, 8, 2048, dtype=BF16, kept=kept)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for position in (100, 600, 9000, 69000):
        first.fill_(position)
        selection.fill_(-5)
        kept.fill_(9)
        graph.replay()
        found = (selection.clone(), kept.clone())
        selection.fill_(-6)
        kept.fill_(8)
        launch()
        assert torch.equal(found[0], selection)
        assert torch.equal(found[1], kept)
        wanted = chosen_rows(scores.cpu(), seen_by(position, 1, 1, 70000), 512)
        assert torch.equal(selection.cpu(), wanted)
