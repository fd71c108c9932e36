"""Engram's rows and gate: kernels against their references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.engram_gate import engram_gate
from kernels.engram_rows import engram_rows
from kernels.reference import engram_gate as reference_gate
from kernels.reference import engram_rows as reference_rows
from tests.support.row_cases import apart, row_cases

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
F32, BF16 = torch.float32, torch.bfloat16
PRECISIONS = [
    {"dtype": dtype, "rounds": rounds}
    for dtype, rounds in ((BF16, True), (F32, True), (F32, False))
]
EPS = 1e-20
ROW_BYTES = {"E4M3": 264, "Q8_0": 272, "Q2_K": 84}


def stored_rows(row_format: str, n_rows: int, *, least: int = 0, most: int = 254) -> Tensor:
    """Random bytes that are numbers, in rows longer than what a row needs."""
    generator = torch.Generator().manual_seed(n_rows)
    data = torch.randint(0, 256, (n_rows, ROW_BYTES[row_format] + 24), generator=generator)
    if row_format == "E4M3":
        data[:, :256][data[:, :256] % 128 == 127] = 0x31
        data[:, 256:264] = torch.randint(least, most + 1, (n_rows, 8), generator=generator)
    elif row_format == "Q8_0":
        data[:, 1:272:34] &= 0xBB  # float16 scales that are finite
    else:
        data[:, 81:84:2] &= 0xBB
    return data.byte()


@pytest.mark.parametrize(("device", "n_tokens"), row_cases())
@pytest.mark.parametrize("row_format", ["E4M3", "Q8_0", "Q2_K"])
def test_rows_equal_the_reference_bit_by_bit(device: str, n_tokens: int, row_format: str) -> None:
    columns = (1, 24, 3)[n_tokens % 3]
    data = stored_rows(row_format, n_tokens * columns, least=2, most=240)
    there = apart(data, device)
    data = data.view(n_tokens, columns, -1)
    settings: Any
    for settings in PRECISIONS if device == "cuda" or n_tokens < 3 else PRECISIONS[:1]:
        settings = {**settings, "row_format": row_format}
        wanted = reference_rows.engram_rows(data, 256, **settings)
        out = torch.full(wanted.shape, float("nan")).to(device)
        engram_rows(there, 256, **settings, columns=columns, out=out)
        assert torch.equal(out.cpu(), wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_the_least_scale_is_a_number_and_the_last_one_is_none(device: str) -> None:
    data = torch.full((1, 66), 0x38, dtype=torch.uint8)
    data[0, 64], data[0, 65] = 0, 255
    found = engram_rows(data.to(device), 64, dtype=F32, rounds=False).cpu()
    assert torch.equal(found[0, :32], torch.full((32,), 2.0**-127))
    assert found[0, 32:].isnan().all()


@pytest.mark.parametrize(("device", "n_tokens"), row_cases())
@pytest.mark.parametrize(("dtype", "streams"), [(BF16, BF16), (BF16, F32), (F32, F32)])
def test_the_gate_equals_the_reference(
    device: str, n_tokens: int, dtype: torch.dtype, streams: torch.dtype
) -> None:
    width, in_place = (75, 640, 96)[n_tokens % 3], n_tokens % 2 == 0
    generator = torch.Generator().manual_seed(width)
    h = torch.randn(n_tokens, 4, width, generator=generator).to(streams)
    kv = torch.randn(n_tokens, 5 * width, generator=generator) * 3
    weight = 1 + 0.3 * torch.randn(4, width, generator=generator)
    h[0, 1] = 0.0
    kv[0, 2 * width : 3 * width] = 0.0
    parts = kv.to(dtype).float()
    keys = parts[:, : 4 * width].unflatten(1, (4, width))
    wanted = reference_gate.engram_gate(h, keys, parts[:, 4 * width :], weight, EPS)
    h = h.to(device)
    out = h if in_place else torch.full_like(h, float("nan"))
    found = engram_gate(h, apart(kv, device), weight.to(device), EPS, dtype=dtype, out=out).cpu()
    assert found.dtype == streams
    difference = (found.double() - wanted.double()).norm()
    assert difference <= (2e-6 if streams == F32 else 1e-3) * wanted.double().norm()


REAL = [pytest.param("cpu", 1, marks=pytest.mark.interpreter)]
REAL += [pytest.param("cuda", n, marks=pytest.mark.gpu) for n in (1, 9)]


@pytest.mark.parametrize(("device", "n_tokens"), REAL)
@pytest.mark.parametrize(("dtype", "streams"), [(BF16, BF16), (F32, F32)])
def test_the_gate_of_real_rows_equals_the_reference(
    device: str, n_tokens: int, dtype: torch.dtype, streams: torch.dtype
) -> None:
    width, eps = 5120, 0.25  # beside a mean square of 1
    generator = torch.Generator().manual_seed(n_tokens)
    h = torch.randn(n_tokens, 4, width, generator=generator).to(streams)
    kv = torch.randn(n_tokens, 5 * width, generator=generator)
    weight = 1 + 0.3 * torch.randn(4, width, generator=generator)
    parts = kv.to(dtype).float()
    keys = parts[:, : 4 * width].unflatten(1, (4, width))
    wanted = reference_gate.engram_gate(h, keys, parts[:, 4 * width :], weight, eps)
    found = engram_gate(h.to(device), kv.to(device), weight.to(device), eps, dtype=dtype).cpu()
    difference = (found.double() - wanted.double()).norm()
    assert difference <= (2e-6 if streams == F32 else 1e-3) * wanted.double().norm()


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="as Q9"):
        engram_rows(torch.zeros(1, 66).byte(), 64, dtype=BF16, rounds=True, row_format="Q9")
    with pytest.raises(ValueError, match="bytes for"):
        engram_rows(torch.zeros(1, 65).byte(), 64, dtype=BF16, rounds=True)
    with pytest.raises(ValueError, match="kv"):
        engram_gate(torch.zeros(1, 4, 32), torch.zeros(1, 128), torch.zeros(4, 32), EPS, dtype=BF16)


def test_on_the_host_the_references_answer() -> None:
    data = stored_rows("E4M3", 6, least=120, most=130)
    found = engram_rows(data, 256, dtype=BF16, rounds=True, columns=3)
    wanted = reference_rows.engram_rows(data.view(2, 3, -1), 256, dtype=BF16, rounds=True)
    assert torch.equal(found, wanted)
    streams = torch.zeros(2, 4, 32)
    added = engram_gate(streams, torch.ones(2, 160), torch.ones(4, 32), EPS, dtype=BF16)
    assert torch.allclose(added, torch.sigmoid(torch.tensor(1e-3)))


@pytest.mark.gpu
def test_every_number_of_tokens_replays_with_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(5)
    width, columns = 5120, 24
    data = stored_rows("E4M3", 33 * columns, least=110, most=130).cuda()
    streams = torch.randn(33, 4, width, generator=generator).to(BF16).cuda()
    kv = torch.randn(33, 5 * width, generator=generator).cuda()
    weight = torch.randn(4, width, generator=generator).cuda()
    rows = engram_rows(data, 256, dtype=BF16, rounds=True, columns=columns)
    added = engram_gate(streams, kv, weight, EPS, dtype=BF16)
    for n in range(1, 34):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            some = engram_rows(data[: n * columns], 256, dtype=BF16, rounds=True, columns=columns)
            part = engram_gate(streams[:n], kv[:n], weight, EPS, dtype=BF16)
        graph.replay()
        assert torch.equal(some, rows[:n])
        assert torch.equal(part, added[:n])
