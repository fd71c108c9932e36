"""Latents, compressed rows, index keys and index queries: kernels against their references."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.index_keys import index_keys
from kernels.index_queries import index_queries
from kernels.pool_latents import pool_latents
from kernels.reference import index_keys as reference_keys
from kernels.reference import index_queries as reference_queries
from kernels.reference import pool_latents as reference_pool
from tests.support.row_cases import apart, row_cases

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
F32, BF16 = torch.float32, torch.bfloat16
EPS = 1e-20
GROUPS = 48
# tokens, first position, ratio, width
STEPS = [
    (1, 0, 1, 64), (1, 6, 2, 512), (1, 7, 2, 512), (2, 7, 2, 48), (5, 4, 2, 96), (8, 3, 3, 64),
    (9, 30, 1, 512), (33, 11, 2, 64),
]  # fmt: skip


def normal(seed: int, *shape: int, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp2(torch.randn(shape, generator=generator) * spread)
    return torch.randn(shape, generator=generator) * scale


def turns_of(n: int, n_pairs: int) -> Tensor:
    angles = torch.outer(torch.arange(n).double(), torch.logspace(0, -3, n_pairs).double())
    return torch.stack([angles.cos(), angles.sin()], 2).float().contiguous()


def on_host(values: Any) -> Any:
    return values.cpu() if isinstance(values, Tensor) else values


def nearly(found: Tensor, wanted: Tensor, dtype: torch.dtype, *, grid: bool) -> bool:
    """Whether all but few values are equal, and those few within a step of their grid."""
    found, wanted = found.float().cpu(), wanted.float()
    if bool(found.isnan().any()):
        return False
    least = 3e-6 if dtype == F32 and not grid else 0.0
    differs = (found - wanted).abs() > least * wanted.abs().amax()
    step = wanted.abs().amax(-1, keepdim=True) * (0.45 if grid else 2.0**-7)
    few = int(differs.sum()) <= math.ceil((0.05 if grid else 0.01) * differs.numel())
    return few and bool(((found - wanted).abs() <= step).all())


class Pooling:
    """A step's tensors, twice: for the kernel and for the reference."""

    def __init__(self, step: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> None:
        self.n_tokens, first, self.ratio, width = step
        self.n_groups = self.n_tokens if self.ratio == 1 else self.n_tokens // self.ratio + 1
        columns = width if self.ratio == 1 else 2 * width
        self.projected = apart(normal(1, self.n_tokens, columns, spread=2), device, 32)
        self.first = torch.tensor([first]).to(device)
        self.norm = (1 + 0.1 * normal(2, width)).to(device)
        self.turns = turns_of(128, width // 8).to(device)
        self.dtype = dtype
        self.open_kv = self.open_scores = None
        if self.ratio > 1:
            self.open_kv = normal(3, self.ratio, width).to(device)
            self.open_scores = normal(4, self.ratio, width).to(device)
        self.rows = torch.full((GROUPS, width), -7.0, dtype=dtype, device=device)
        self.latent = torch.full((self.n_groups, width), float("nan")).to(device)

    def run(self, function: Any, *, rounds: bool) -> None:
        function(
            self.projected, self.first, self.ratio, self.open_kv, self.open_scores, self.norm,
            self.turns, self.rows, EPS, dtype=self.dtype, rounds=rounds, latent=self.latent,
        )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("dtype", "rounds"), [(BF16, True), (F32, True), (F32, False)])
def test_pooling_equals_the_reference(
    device: str, step: tuple[int, int, int, int], dtype: torch.dtype, rounds: bool
) -> None:
    wanted, found = Pooling(step, dtype, "cpu"), Pooling(step, dtype, device)
    wanted.run(reference_pool.pool_latents, rounds=rounds)
    found.run(pool_latents, rounds=rounds)
    assert nearly(found.latent, wanted.latent, dtype, grid=False)
    assert nearly(found.rows, wanted.rows, dtype, grid=rounds)
    untouched = wanted.rows == -7
    assert torch.equal(found.rows.cpu()[untouched], wanted.rows[untouched])
    if wanted.open_kv is not None:
        assert on_host(found.open_kv).equal(wanted.open_kv)
        assert on_host(found.open_scores).equal(wanted.open_scores)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ratio", [2, 3])
def test_one_token_at_a_time_pools_as_many_do(device: str, ratio: int) -> None:
    n, width = 9, 64
    whole = Pooling((n, 0, ratio, width), BF16, device)
    whole.run(pool_latents, rounds=True)
    single = Pooling((n, 0, ratio, width), BF16, device)
    for token in range(n):
        latent = pool_latents(
            single.projected[token : token + 1], torch.tensor([token]).to(device), ratio,
            single.open_kv, single.open_scores, single.norm, single.turns, single.rows, EPS,
            dtype=BF16, rounds=True,
        )  # fmt: skip
        group, closes = token // ratio, token % ratio == ratio - 1
        assert torch.equal(latent[0], whole.latent[group] if closes else 0 * whole.norm)
    assert torch.equal(single.rows, whole.rows)
    assert on_host(single.open_kv).equal(on_host(whole.open_kv))


@pytest.mark.parametrize(("device", "n_tokens"), row_cases())
def test_any_number_of_tokens_pools_as_the_longest_step_does(device: str, n_tokens: int) -> None:
    width, end = 64 if device == "cpu" else 512, 40
    begin, closed = end - n_tokens, end // 2
    whole = Pooling((33, end - 33, 2, width), BF16, device)
    whole.run(pool_latents, rounds=True)
    part = Pooling((n_tokens, begin, 2, width), BF16, device)
    part.projected = whole.projected[-n_tokens:]
    if n_tokens < 33:  # the token before left this
        before = whole.projected[-n_tokens - 1]
        states: Any = (part.open_kv, part.open_scores)
        for state, values in zip(states, before.split(width), strict=True):
            state[(begin - 1) % 2] = values
    part.run(pool_latents, rounds=True)
    first, n_closed = begin // 2, closed - begin // 2
    assert torch.equal(part.rows[first:closed], whole.rows[first:closed])
    assert bool((part.rows[:first] == -7).all()) and bool((part.rows[closed:] == -7).all())
    assert torch.equal(part.latent[:n_closed], whole.latent[17 - n_closed :])
    assert not bool(part.latent[n_closed:].any())
    assert on_host(part.open_kv).equal(on_host(whole.open_kv))
    assert on_host(part.open_scores).equal(on_host(whole.open_scores))
    dim = min(width, 128)
    norm = (1 + 0.1 * normal(8, dim)).to(device)
    keys = [torch.full((GROUPS, dim), -7.0, dtype=BF16, device=device) for _ in "12"]
    for step, given, found in ((whole, 33, keys[0]), (part, n_tokens, keys[1])):
        index_keys(
            step.latent[:, :dim], step.first, given, 2, norm, step.turns, found, EPS, dtype=BF16,
            rounds=True,
        )  # fmt: skip
    assert torch.equal(keys[1][first:closed], keys[0][first:closed])
    assert bool((keys[1][:first] == -7).all()) and bool((keys[1][closed:] == -7).all())


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_with_enough_slots_may_run_again(device: str) -> None:
    n, ratio, width = 5, 2, 32
    step = Pooling((n, 7, ratio, width), BF16, device)
    step.open_kv, step.open_scores = (normal(i, 6, width).to(device) for i in (5, 6))
    step.run(pool_latents, rounds=True)
    once = [on_host(x).clone() for x in (step.latent, step.rows, step.open_kv, step.open_scores)]
    step.run(pool_latents, rounds=True)
    again = [on_host(x) for x in (step.latent, step.rows, step.open_kv, step.open_scores)]
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("step", [(*s[:3], w) for s, w in zip(STEPS, [128, 96] * 4, strict=True)])
@pytest.mark.parametrize(("dtype", "rounds"), [(BF16, True), (F32, True), (F32, False)])
def test_keys_equal_the_reference(
    device: str, step: tuple[int, int, int, int], dtype: torch.dtype, rounds: bool
) -> None:
    n_tokens, first, ratio, width = step
    n_rows = n_tokens // ratio + 1
    projected = normal(7, n_rows, width, spread=3)
    norm, turns = 1 + 0.1 * normal(8, width), turns_of(128, width // 4)
    wanted = torch.full((GROUPS, width), -7.0, dtype=dtype)
    found = wanted.to(device, copy=True)
    at = torch.tensor([first])
    reference_keys.index_keys(
        projected, at, n_tokens, ratio, norm, turns, wanted, EPS, dtype=dtype, rounds=rounds
    )
    index_keys(
        apart(projected, device), at.to(device), n_tokens, ratio, norm.to(device),
        turns.to(device), found, EPS, dtype=dtype, rounds=rounds,
    )  # fmt: skip
    assert nearly(found, wanted, dtype, grid=rounds)
    assert torch.equal((found == -7).all(1).cpu(), (wanted == -7).all(1))


@pytest.mark.parametrize(("device", "n_tokens"), row_cases())
@pytest.mark.parametrize(("dtype", "rounds"), [(BF16, True), (F32, True), (F32, False)])
@pytest.mark.parametrize("spread", [1.0, 20.0])
def test_queries_equal_the_reference_bit_by_bit(
    device: str, n_tokens: int, dtype: torch.dtype, rounds: bool, spread: float
) -> None:
    heads, dim = ((2, 32), (32, 128), (3, 96))[n_tokens % 3 if n_tokens < 8 else 0]
    projected = normal(9, n_tokens, heads * dim, spread=spread)
    projected[0, :dim] = 0.0
    turns, first = turns_of(64, dim // 4), torch.tensor([17])
    settings: Any = {"dim": dim, "dtype": dtype, "rounds": rounds}
    wanted = reference_queries.index_queries(projected, first, turns, **settings)
    out = torch.full(wanted.shape, float("nan")).to(device)
    projected = apart(projected, device, 16)
    index_queries(projected, first.to(device), turns.to(device), out=out, **settings)
    assert torch.equal(out.cpu(), wanted)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("device", DEVICES)
def test_a_value_that_is_no_number_stays_one(device: str) -> None:
    projected, first, turns = normal(10, 1, 64), torch.tensor([3]), turns_of(8, 8)
    projected[0, 40] = float("nan")
    settings: Any = {"dim": 64, "dtype": BF16, "rounds": True}
    wanted = reference_queries.index_queries(projected, first, turns, **settings)
    found = index_queries(projected.to(device), first.to(device), turns.to(device), **settings)
    assert found[0, 0, 40].isnan()
    assert torch.equal(found.isnan().cpu(), wanted.isnan())


def test_on_the_host_the_references_answer() -> None:
    n_tokens, first, ratio, width = 5, 7, 2, 64
    wanted, found = (Pooling((n_tokens, first, ratio, width), BF16, "cpu") for _ in range(2))
    wanted.run(reference_pool.pool_latents, rounds=True)
    found.run(pool_latents, rounds=True)
    assert torch.equal(found.latent, wanted.latent)
    assert torch.equal(found.rows, wanted.rows)
    assert (found.rows != -7).any(1).nonzero().flatten().tolist() == [3, 4, 5]
    keys, at = torch.zeros(GROUPS, width, dtype=BF16), found.first
    index_keys(
        found.latent, at, n_tokens, ratio, found.norm, found.turns, keys, EPS, dtype=BF16,
        rounds=True,
    )  # fmt: skip
    assert keys.any(1).nonzero().flatten().tolist() == [3, 4, 5]
    settings: Any = {"dim": 32, "dtype": BF16, "rounds": True}
    projected, turns = normal(14, n_tokens, 64), turns_of(32, 8)
    queries = index_queries(projected, at, turns, **settings)
    reference = reference_queries.index_queries(projected, at, turns, **settings)
    assert torch.equal(queries, reference)


def test_shapes_that_differ_are_refused() -> None:
    step = Pooling((2, 0, 2, 32), BF16, "cpu")
    step.open_kv = torch.zeros(1, 32)
    with pytest.raises(ValueError, match="2 slots of 32"):
        step.run(pool_latents, rounds=True)
    with pytest.raises(ValueError, match="heads of 48"):
        index_queries(torch.zeros(1, 96), step.first, step.turns, dim=48, dtype=BF16, rounds=True)
    with pytest.raises(ValueError, match="1 rows for 4 tokens"):
        index_keys(
            torch.zeros(1, 32), step.first, 4, 2, step.norm, step.turns,
            torch.zeros(4, 32, dtype=BF16), EPS, dtype=BF16, rounds=True,
        )  # fmt: skip


@pytest.mark.gpu
def test_a_tokens_bits_do_not_depend_on_the_others() -> None:
    projected, turns = normal(12, 33, 4 * 128).cuda(), turns_of(128, 32).cuda()
    settings: Any = {"dim": 128, "dtype": BF16, "rounds": True}
    many = index_queries(projected, torch.tensor([7]).cuda(), turns, **settings)
    whole = Pooling((33, 7, 1, 512), BF16, "cuda")
    whole.run(pool_latents, rounds=True)
    norm = (1 + 0.1 * normal(8, 128)).cuda()

    def keys_of(n: int) -> Tensor:
        keys = torch.full((GROUPS, 128), -7.0, dtype=BF16, device="cuda")
        index_keys(
            whole.latent[-n:, :128], torch.tensor([40 - n]).cuda(), n, 1, norm, turns, keys, EPS,
            dtype=BF16, rounds=True,
        )  # fmt: skip
        return keys[40 - n : 40]

    keys = keys_of(33)
    for n in range(1, 34):
        assert torch.equal(keys_of(n), keys[-n:])
        at = torch.tensor([40 - n]).cuda()
        assert torch.equal(index_queries(projected[-n:], at, turns, **settings), many[-n:])
        part = Pooling((n, 40 - n, 1, 512), BF16, "cuda")
        part.projected = whole.projected[-n:]
        part.run(pool_latents, rounds=True)
        assert torch.equal(part.latent, whole.latent[-n:])
        assert torch.equal(part.rows[40 - n : 40], whole.rows[40 - n : 40])


@pytest.mark.gpu
@pytest.mark.parametrize("n_tokens", [1, 2, 5])
def test_a_replayed_graph_writes_where_the_position_says(n_tokens: int) -> None:
    steps = [Pooling((n_tokens, 0, 2, 512), BF16, "cuda") for _ in range(2)]
    keys = [torch.zeros(GROUPS, 128, dtype=BF16).cuda() for _ in range(2)]
    projected, norm = normal(13, n_tokens, 512).cuda(), torch.ones(128).cuda()
    queries = [torch.zeros(n_tokens, 4, 128).cuda() for _ in range(2)]

    def launch(i: int) -> None:
        step = steps[i]
        settings: Any = {"dtype": BF16, "rounds": True}
        step.run(pool_latents, rounds=True)
        index_keys(
            step.latent[:, :128], step.first, n_tokens, 2, norm, step.turns, keys[i], EPS,
            **settings,
        )  # fmt: skip
        index_queries(projected, step.first, step.turns, dim=128, out=queries[i], **settings)

    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(0)
    fresh = Pooling((n_tokens, 0, 2, 512), BF16, "cuda")
    for name in ("open_kv", "open_scores", "rows"):
        getattr(steps[0], name).copy_(getattr(fresh, name))
    keys[0].zero_()
    for first in (0, 1, 6, 7, 50):
        for step in steps:
            step.first.fill_(first)
            step.latent.fill_(float("nan"))
        graph.replay()
        launch(1)
        for name in ("latent", "rows", "open_kv", "open_scores"):
            assert torch.equal(getattr(steps[0], name), getattr(steps[1], name))
        assert torch.equal(keys[0], keys[1])
        assert torch.equal(queries[0], queries[1])
