"""Activations may come and go in bf16 as well as in f32: the same values, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.attend_sparse import attend_sparse
from kernels.engram_gate import engram_gate
from kernels.engram_rows import engram_rows
from kernels.hc_collapse import hc_collapse_norm
from kernels.norm_latents import norm_latents
from kernels.round_fp8 import round_fp8
from kernels.swiglu import swiglu

CASES = [pytest.param("cpu", n, marks=pytest.mark.interpreter) for n in (1, 9)]
CASES += [pytest.param("cuda", n, marks=pytest.mark.gpu) for n in (*range(1, 34), 2048)]
BF16, F32 = torch.bfloat16, torch.float32
EPS = 1e-20


def normal(device: str, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device)


def empty(device: str, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def same(launch: Callable[[torch.dtype], Tensor]) -> None:
    """What is launched with bf16 gives what it gives with f32."""
    found, wanted = launch(BF16), launch(F32)
    assert (found.dtype, wanted.dtype) == (BF16, F32)
    assert not wanted.isnan().any()
    assert torch.equal(found.float(), wanted)


@pytest.mark.parametrize(("device", "n_tokens"), CASES)
def test_latents_and_the_row_that_a_sublayer_reads(device: str, n_tokens: int) -> None:
    q, k, hidden = 96, 64, 160
    turns = normal(device, 64 + n_tokens, 8, 2)
    projected, norms = normal(device, n_tokens, q + k), normal(device, q + k, seed=1)
    streams, pre = normal(device, n_tokens, 4, hidden), normal(device, n_tokens, 4, seed=2)

    def latents(kind: torch.dtype) -> Tensor:
        return norm_latents(
            projected, norms[:q], norms[q:], torch.tensor([7], device=device), turns, EPS,
            dtype=BF16, rounds=True, ring=empty(device, n_tokens + 3, k, dtype=BF16),
            qr=empty(device, n_tokens, q, dtype=kind),
        )  # fmt: skip

    def rounded(kind: torch.dtype) -> Tensor:
        out = empty(device, n_tokens, hidden, dtype=kind)
        norm = normal(device, hidden, seed=3)
        hc_collapse_norm(streams, pre, norm, EPS, BF16, rounded=out)
        return out

    same(latents)
    same(rounded)


@pytest.mark.parametrize(("device", "n_tokens"), CASES)
def test_what_lies_between_products(device: str, n_tokens: int) -> None:
    width = 96
    x, gate_up = normal(device, n_tokens, width), normal(device, n_tokens, 2 * width).bfloat16()
    x = x.bfloat16()

    def rounded(kind: torch.dtype) -> Tensor:
        return round_fp8(x, out=empty(device, n_tokens, width, dtype=kind))

    def activated(kind: torch.dtype) -> Tensor:
        out = empty(device, n_tokens, width, dtype=kind)
        return swiglu(gate_up.to(kind), 1.0, dtype=BF16, rounds=True, out=out)

    same(rounded)
    same(activated)


@pytest.mark.parametrize(("device", "n_tokens"), CASES)
def test_queries_and_what_they_attend_to(device: str, n_tokens: int) -> None:
    heads, k, window, top_k = 3, 64, 40, 33
    q, sink = normal(device, n_tokens, heads * k).bfloat16(), normal(device, heads)
    ring, rows = normal(device, window + n_tokens - 1, k, seed=1), normal(device, 70, k, seed=2)
    selection = torch.randint(-1, 70, (n_tokens, top_k)).int().to(device)
    turns, first = normal(device, 90 + n_tokens, 8, 2), torch.tensor([80], device=device)

    def attended(kind: torch.dtype) -> Tensor:
        return attend_sparse(
            q.to(kind), first, turns, ring.bfloat16(), window, rows.bfloat16(), selection, sink,
            dtype=BF16, out=empty(device, n_tokens, heads * k, dtype=kind),
        )  # fmt: skip

    same(attended)


@pytest.mark.parametrize(("device", "n_tokens"), CASES)
def test_engram_rows_and_their_keys(device: str, n_tokens: int) -> None:
    columns, dim, width = 3, 64, 96
    data = torch.randint(0, 120, (n_tokens * columns, dim + dim // 32), dtype=torch.uint8)
    streams, weight = normal(device, n_tokens, 4, width), normal(device, 4, width, seed=1)
    kv = normal(device, n_tokens, 5 * width).bfloat16()

    def values(kind: torch.dtype) -> Tensor:
        out = empty(device, n_tokens, columns * dim, dtype=kind)
        return engram_rows(data.to(device), dim, dtype=BF16, rounds=True, columns=columns, out=out)

    same(values)
    gated = engram_gate(streams, kv, weight, EPS, dtype=BF16)
    assert torch.equal(gated, engram_gate(streams, kv.float(), weight, EPS, dtype=BF16))
