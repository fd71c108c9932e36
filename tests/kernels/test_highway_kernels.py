"""The highway's operators: kernels against their references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.bf16_bits import round_to_bf16  # noqa: F401  compiled with the kernels that use it
from kernels.byte_planes import empty_planes
from kernels.hc_collapse import hc_collapse_norm
from kernels.hc_expand import hc_expand
from kernels.hc_mix import hc_mix
from kernels.reference import hc_collapse as reference_collapse
from kernels.reference import hc_expand as reference_expand
from kernels.reference import hc_mix as reference_mix
from kernels.reference.byte_planes import byte_planes
from kernels.reference.round_fp8 import round_fp8
from tests.support.row_cases import row_cases

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
CASES = row_cases()
WIDTHS = (96, 128, 75, 45, 300)  # by the number of tokens
EPS = 1e-20


def streams_of(n_tokens: int, width: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(n_tokens * width)
    return torch.randn(n_tokens, 4, width, generator=generator).to(dtype)


def close(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    difference = (found.cpu().double() - wanted.double()).norm()
    return bool(difference <= tolerance * wanted.double().norm())


@pytest.mark.parametrize(("device", "n_tokens"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixes_equal_the_reference(device: str, n_tokens: int, dtype: torch.dtype) -> None:
    width = WIDTHS[n_tokens % 5]
    streams = streams_of(n_tokens, width, dtype)
    generator = torch.Generator().manual_seed(1)
    fn = torch.randn(24, 4 * width, generator=generator) * 0.1
    scale, base = torch.rand(24, generator=generator), torch.randn(24, generator=generator)
    n_iterations = 20 if n_tokens == 1 else 3  # most of the time under the interpreter
    settings: Any = {"n_iterations": n_iterations, "hc_eps": 1e-6, "norm_eps": EPS}
    wanted = reference_mix.hc_mix(streams, fn, scale, base, **settings)
    found = hc_mix(streams.to(device), fn.to(device), scale.to(device), base.to(device), **settings)
    for found_part, wanted_part in zip(found, wanted, strict=True):
        assert (found_part.cpu() - wanted_part).abs().max() <= 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n_iterations", [1, 2])
@pytest.mark.parametrize(("hc_eps", "norm_eps"), [(0.03, EPS), (1e-6, 0.5), (0.03, 0.5)])
def test_mixes_miss_no_epsilon(
    device: str, n_iterations: int, hc_eps: float, norm_eps: float
) -> None:
    streams = streams_of(2, 96, torch.float32)
    generator = torch.Generator().manual_seed(6)
    fn = torch.randn(24, 384, generator=generator) * 0.1
    scale, base = torch.rand(24, generator=generator), torch.randn(24, generator=generator)
    settings: Any = {"n_iterations": n_iterations, "hc_eps": hc_eps, "norm_eps": norm_eps}
    wanted = reference_mix.hc_mix(streams, fn, scale, base, **settings)
    given = (streams.to(device), fn.to(device), scale.to(device), base.to(device))
    for found, part in zip(hc_mix(*given, **settings), wanted, strict=True):
        assert (found.cpu() - part).abs().max() <= 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_the_models_epsilons_show_where_streams_and_coefficients_are_tiny(device: str) -> None:
    streams = streams_of(2, 96, torch.float32) * 1e-3  # a mean square of 1e-6
    generator = torch.Generator().manual_seed(7)
    fn = torch.randn(24, 384, generator=generator) * 0.1
    base = torch.full((24,), -30.0)
    base[8::4] = 0.0  # each row of comb takes from the first column: the others' sums are tiny
    settings: Any = {"n_iterations": 1, "hc_eps": 1e-6, "norm_eps": 1e-6}
    wanted = reference_mix.hc_mix(streams, fn, torch.ones(24), base, **settings)
    ones = torch.ones(24, device=device)
    found = hc_mix(streams.to(device), fn.to(device), ones, base.to(device), **settings)
    assert (wanted[0] - 1e-6).abs().max() < 1e-9
    assert (wanted[2][:, :, 1:] - 0.2).abs().max() < 1e-3  # 0.25 without
    assert (found[0].cpu() - wanted[0]).abs().max() <= 1e-5 * 1e-6
    assert (found[2].cpu() - wanted[2]).abs().max() <= 1e-5


REAL = [pytest.param("cpu", 1, marks=pytest.mark.interpreter)]
REAL += [pytest.param("cuda", n, marks=pytest.mark.gpu) for n in (1, 9, 33)]


@pytest.mark.parametrize(("device", "n_tokens"), REAL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixes_of_real_streams_equal_the_reference(
    device: str, n_tokens: int, dtype: torch.dtype
) -> None:
    streams = streams_of(n_tokens, 5120, dtype)
    generator = torch.Generator().manual_seed(8)
    fn = torch.randn(24, 4 * 5120, generator=generator) * 0.01
    scale, base = torch.rand(24, generator=generator), torch.randn(24, generator=generator)
    settings: Any = {"n_iterations": 3, "hc_eps": 1e-6, "norm_eps": 0.25}
    wanted = reference_mix.hc_mix(streams, fn, scale, base, **settings)
    given = (streams.to(device), fn.to(device), scale.to(device), base.to(device))
    for found, part in zip(hc_mix(*given, **settings), wanted, strict=True):
        assert (found.cpu() - part).abs().max() <= 1e-5


@pytest.mark.parametrize(("device", "n_tokens"), REAL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_streams_collapse_as_the_reference_says(
    device: str, n_tokens: int, dtype: torch.dtype
) -> None:
    streams = streams_of(n_tokens, 5120, dtype)
    generator = torch.Generator().manual_seed(9)
    pre = torch.rand(n_tokens, 4, generator=generator)
    weight = torch.rand(5120, generator=generator)
    wanted = reference_collapse.hc_collapse_norm(streams, pre, weight, 0.25, dtype)
    found = hc_collapse_norm(streams.to(device), pre.to(device), weight.to(device), 0.25, dtype)
    assert close(found, wanted, 2e-6 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_a_tokens_mixes_have_the_same_bits_alone_and_in_a_chunk(device: str) -> None:
    streams = streams_of(19, 160, torch.float32).to(device)
    fn = torch.randn(24, 640, generator=torch.Generator().manual_seed(1)).to(device) * 0.1
    ones = torch.ones(24, device=device)
    settings: Any = {"n_iterations": 3, "hc_eps": 1e-6, "norm_eps": EPS}
    together = hc_mix(streams, fn, ones, ones, **settings)
    for token in (0, 15, 16, 18):
        alone = hc_mix(streams[token : token + 1], fn, ones, ones, **settings)
        for part, whole in zip(alone, together, strict=True):
            assert torch.equal(part[0], whole[token])


@pytest.mark.parametrize(("device", "n_tokens"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_collapse_and_norm_equal_the_reference(
    device: str, n_tokens: int, dtype: torch.dtype
) -> None:
    width = WIDTHS[n_tokens % 5]
    streams = streams_of(n_tokens, width, dtype)
    generator = torch.Generator().manual_seed(2)
    pre, weight = torch.rand(n_tokens, 4, generator=generator), torch.rand(width)
    wanted = reference_collapse.hc_collapse_norm(streams, pre, weight, EPS, dtype)
    found = hc_collapse_norm(streams.to(device), pre.to(device), weight.to(device), EPS, dtype)
    assert found.dtype == dtype
    assert close(found, wanted, 2e-6 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize(("device", "n_tokens"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_leaves_the_same_row_rounded_to_fp8(
    device: str, n_tokens: int, dtype: torch.dtype
) -> None:
    width = (96, 160, 320)[n_tokens % 3]
    streams = streams_of(n_tokens, width, dtype).to(device)
    generator = torch.Generator().manual_seed(2)
    pre, weight = torch.rand(n_tokens, 4, generator=generator).to(device), torch.rand(width)
    plain = hc_collapse_norm(streams, pre, weight.to(device), EPS, dtype)
    out, rounded = (torch.full((n_tokens, width), float("nan"), device=device) for _ in "12")
    planes = empty_planes(n_tokens, width, torch.device(device))
    hc_collapse_norm(
        streams, pre, weight.to(device), EPS, dtype, out=out, rounded=rounded, planes=planes
    )
    # The two kernels may fuse products in other places.
    assert close(out.float(), plain.cpu().float(), 1e-6 if dtype == torch.float32 else 1e-3)
    assert torch.equal(rounded.cpu(), round_fp8(out.cpu()))
    for found, wanted in zip(planes, byte_planes(out.cpu()), strict=True):
        assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize(("device", "n_tokens"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expand_equals_the_reference_and_sums_over_the_first_index(
    device: str, n_tokens: int, dtype: torch.dtype
) -> None:
    width = WIDTHS[n_tokens % 5]
    streams = streams_of(n_tokens, width, dtype)
    generator = torch.Generator().manual_seed(3)
    y = torch.randn(n_tokens, width, generator=generator)
    post = torch.rand(n_tokens, 4, generator=generator)
    comb = torch.rand(n_tokens, 4, 4, generator=generator)
    wanted = reference_expand.hc_expand(y, streams, post, comb)
    out = torch.full_like(streams, float("nan")).to(device)
    found = hc_expand(y.to(device), streams.to(device), post.to(device), comb.to(device), out=out)
    assert found.dtype == dtype
    assert close(found, wanted, 1e-6 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_expand_adds_the_shared_row_last_and_rounds_both(device: str) -> None:
    streams = streams_of(3, 160, torch.float32)
    generator = torch.Generator().manual_seed(4)
    y, shared = torch.randn(2, 3, 160, generator=generator)
    post = torch.rand(3, 4, generator=generator)
    comb = torch.rand(3, 4, 4, generator=generator)
    row = (y + shared.bfloat16().float()).bfloat16()
    wanted = hc_expand(row.to(device), streams.to(device), post.to(device), comb.to(device))
    out = torch.full_like(streams, float("nan")).to(device)
    hc_expand(
        y.to(device), streams.to(device), post.to(device), comb.to(device),
        shared=shared.to(device), dtype=torch.bfloat16, out=out,
    )  # fmt: skip
    assert close(out, wanted.cpu(), 1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_expand_adds_the_experts_rows_in_plan_order(device: str) -> None:
    streams = streams_of(1, 160, torch.float32)
    generator = torch.Generator().manual_seed(5)
    parts = torch.randn(3, 160, generator=generator) * 100
    parts[1] = float("nan")  # absent, and what stands there is not read
    present = torch.tensor([1, 0, 7])
    shared = torch.randn(1, 160, generator=generator)
    post, comb = torch.rand(1, 4, generator=generator), torch.rand(1, 4, 4, generator=generator)
    wanted = reference_expand.hc_expand(parts[:1] + parts[2:] + shared, streams, post, comb)
    found = hc_expand(
        parts.to(device), streams.to(device), post.to(device), comb.to(device),
        present=present.to(device), shared=shared.to(device),
    )  # fmt: skip
    assert close(found, wanted, 1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_mixes_fill_the_tensors_given(device: str) -> None:
    streams = streams_of(2, 128, torch.float32).to(device)
    fn, line = torch.rand(24, 512).to(device), torch.rand(24).to(device)
    settings: Any = {"n_iterations": 20, "hc_eps": 1e-6, "norm_eps": EPS}
    shapes = [(2, 4), (2, 4), (2, 4, 4)]
    out = tuple(torch.full(shape, float("nan"), device=device) for shape in shapes)
    wanted = hc_mix(streams, fn, line, line, **settings)
    hc_mix(streams, fn, line, line, **settings, out=(out[0], out[1], out[2]))
    assert all(torch.equal(a, b) for a, b in zip(out, wanted, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_an_all_zero_row_stays_zero_under_the_tiny_epsilon(device: str) -> None:
    streams = torch.zeros(1, 4, 64).to(device)
    found = hc_collapse_norm(
        streams, torch.ones(1, 4).to(device), torch.ones(64).to(device), EPS, torch.float32
    )
    assert not found.cpu().any()


def test_shapes_that_differ_are_refused() -> None:
    streams = torch.zeros(2, 4, 32)
    with pytest.raises(ValueError, match="hc_mix"):
        hc_mix(
            streams, torch.zeros(24, 64), torch.zeros(24), torch.zeros(24),
            n_iterations=2, hc_eps=1e-6, norm_eps=EPS,
        )  # fmt: skip
    with pytest.raises(ValueError, match="hc_collapse_norm"):
        hc_collapse_norm(streams, torch.zeros(2, 3), torch.zeros(32), EPS, torch.float32)
    with pytest.raises(ValueError, match="hc_expand"):
        hc_expand(torch.zeros(1, 32), streams, torch.zeros(2, 4), torch.zeros(2, 4, 4))
