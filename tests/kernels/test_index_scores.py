"""Index scores: the kernel against its reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.index_scores import index_scores
from kernels.reference import index_scores as reference
from kernels.reference.round_fp4_index import round_fp4_index

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
F32, BF16 = torch.float32, torch.bfloat16
# tokens, first position, ratio, rows, heads, dim
STEPS = [
    (1, 300, 1, 290, 32, 128), (1, 1, 2, 40, 4, 32), (2, 99, 2, 130, 5, 96),
    (8, 20, 1, 45, 3, 32), (9, 30, 1, 150, 16, 64), (33, 1, 1, 36, 2, 32),
]  # fmt: skip


def tensors(
    n_tokens: int, n_rows: int, heads: int, dim: int, dtype: torch.dtype, spread: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n_tokens + n_rows)

    def normal(*shape: int) -> Tensor:
        size = torch.exp2(spread * torch.randn(*shape[:-1], 1, generator=generator))
        return torch.randn(shape, generator=generator) * size

    queries = round_fp4_index(normal(n_tokens, heads, dim).to(dtype))
    return queries, normal(n_tokens, heads), round_fp4_index(normal(n_rows, dim)).to(dtype)


def wanted_of(
    queries: Tensor, projection: Tensor, keys: Tensor, first: int, ratio: int
) -> tuple[Tensor, Tensor]:
    """Scores by the reference, and the size of the largest term of each."""
    n_tokens, heads, dim = queries.shape
    weights = projection.to(keys.dtype) * (dim**-0.5 * heads**-0.5)
    scores = reference.index_scores(queries, keys, weights)
    terms = torch.einsum("thk,gk->thg", queries, keys.float()).relu() * weights.float()[..., None]
    visible = (first + 1 + torch.arange(n_tokens)) // ratio
    hidden = torch.arange(len(keys)) >= visible[:, None]
    return scores.masked_fill(hidden, -torch.inf), terms.abs().amax(1)


def agrees(found: Tensor, wanted: Tensor, terms: Tensor, dtype: torch.dtype) -> bool:
    """Whether scores are equal but for a few in a thousand that are an ulp of a term away."""
    found = found.cpu()
    hidden = wanted == -torch.inf
    differs = (found != wanted) & ~hidden
    ulp = terms * (2.0**-7 if dtype == BF16 else 4e-6)
    near = ((found - wanted).abs() <= ulp) | hidden
    few = dtype == F32 or int(differs.sum()) <= 2 + differs.numel() // 500
    return few and bool(near.all()) and torch.equal(found == -torch.inf, hidden)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("spread", [0.5, 6.0])
def test_scores_equal_the_reference(
    device: str, step: tuple[int, int, int, int, int, int], dtype: torch.dtype, spread: float
) -> None:
    n_tokens, first, ratio, n_rows, heads, dim = step
    queries, projection, keys = tensors(n_tokens, n_rows, heads, dim, dtype, spread)
    wanted, terms = wanted_of(queries, projection, keys, first, ratio)
    scores = torch.full((n_tokens, n_rows + 5), float("nan")).to(device)[:, :n_rows]
    found = index_scores(
        queries.to(device), projection.to(device), keys.to(device),
        torch.tensor([first]).to(device), ratio, dtype=dtype, scores=scores,
    )  # fmt: skip
    end = min((first + n_tokens) // ratio, n_rows)
    assert found[:, -(-end // 128) * 128 :].isnan().all()
    # What a token does not see may be left as it was.
    found = found.cpu().masked_fill(found.cpu().isnan() & (wanted == -torch.inf), -torch.inf)
    assert agrees(found[:, :end], wanted[:, :end], terms[:, :end], dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_a_tokens_bits_do_not_depend_on_the_others(device: str) -> None:
    queries, projection, keys = (x.to(device) for x in tensors(9, 200, 8, 64, BF16))
    many = index_scores(queries, projection, keys, torch.tensor([150]).to(device), 1, dtype=BF16)
    for t in (0, 5, 8):
        one = index_scores(
            queries[t : t + 1], projection[t : t + 1], keys, torch.tensor([150 + t]).to(device), 1,
            dtype=BF16,
        )  # fmt: skip
        assert torch.equal(one[0], many[t])


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_no_token_sees_are_not_read(device: str) -> None:
    queries, projection, keys = tensors(2, 140, 4, 32, BF16)
    keys[60:] = float("nan")
    found = index_scores(
        queries.to(device), projection.to(device), keys.to(device), torch.tensor([58]).to(device),
        1, dtype=BF16,
    )  # fmt: skip
    assert found[0, :59].isfinite().all()
    assert found[1, :60].isfinite().all()
    assert (found[1, 60:] == -torch.inf).all()
    assert found[0, 59] == -torch.inf


def test_on_the_host_the_reference_answers() -> None:
    queries, projection, keys = tensors(3, 40, 4, 32, BF16)
    found = index_scores(queries, projection, keys, torch.tensor([20]), 1, dtype=BF16)
    assert torch.equal(found, wanted_of(queries, projection, keys, 20, 1)[0])


def test_shapes_that_differ_are_refused() -> None:
    queries, projection, keys = tensors(1, 40, 4, 32, BF16)
    first = torch.tensor([0])
    with pytest.raises(ValueError, match="projection"):
        index_scores(queries, projection[:, :3], keys, first, 1, dtype=BF16)
    with pytest.raises(ValueError, match="wanted"):
        index_scores(queries, projection, keys.float(), first, 1, dtype=BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("n_tokens", range(1, 34))
def test_large_scores_equal_the_reference_and_replay(n_tokens: int) -> None:
    n_rows, first = 20001, 20001 - n_tokens - 3
    queries, projection, keys = tensors(n_tokens, n_rows, 32, 128, BF16)
    wanted, terms = wanted_of(queries, projection, keys, first, 1)
    queries, projection, keys = queries.cuda(), projection.cuda(), keys.cuda()
    at = torch.tensor([first]).cuda()
    scores = torch.full((n_tokens, n_rows), -torch.inf).cuda()
    index_scores(queries, projection, keys, at, 1, dtype=BF16, scores=scores)
    assert agrees(scores, wanted, terms, BF16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        index_scores(queries, projection, keys, at, 1, dtype=BF16, scores=scores)
    once = scores.clone()
    scores.fill_(float("nan"))
    graph.replay()
    assert torch.equal(scores[:, : first + 1], once[:, : first + 1])
