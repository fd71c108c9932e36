"""The three activation roundings, against the formulas computed another way."""

import pytest
import torch

from kernels.formats import e8m0, fp4, fp8
from kernels.reference.round_fp4_index import round_fp4_index
from kernels.reference.round_fp4_latent import round_fp4_latent
from kernels.reference.round_fp8 import round_fp8


@pytest.fixture
def values():
    generator = torch.Generator().manual_seed(3)
    spread = torch.logspace(-30, 20, 4096, base=2)[torch.randperm(4096, generator=generator)]
    x = torch.randn(4096, generator=generator) * spread
    return torch.cat([x, torch.zeros(128)]).view(-1, 64).bfloat16()


def by_scale(x, group, floor, factor):
    groups = x.float().view(-1, group)
    amax = groups.abs().amax(1, keepdim=True).clamp_min(floor)
    mantissa, exponent = torch.frexp(amax * torch.tensor(factor, dtype=torch.float32))
    exponent = exponent - (mantissa == 0.5).int()  # frexp's mantissa is in [0.5, 1)
    return groups, torch.ldexp(torch.ones_like(amax), exponent)


def nearest_e2m1(v):
    """The nearest of the eight magnitudes, ties to the even code."""
    grid = torch.tensor(fp4.MAGNITUDES, dtype=torch.float64)
    distance = (v.double().abs().clamp(max=6).unsqueeze(-1) - grid).abs()
    distance += torch.arange(8) % 2 * 1e-12
    return torch.copysign(grid[distance.argmin(-1)].float(), v)


def test_fp8_rounding_is_the_formula_with_the_librarys_cast(values):
    groups, scale = by_scale(values, 32, 1e-4, 1 / 448)
    wanted = (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(round_fp8(values), wanted.view(values.shape))


def test_index_rounding_is_the_formula_with_the_nearest_code(values):
    groups, scale = by_scale(values, 32, 6 * 2.0**-126, 1 / 6)
    wanted = nearest_e2m1(groups / scale) * scale
    assert torch.equal(round_fp4_index(values), wanted.view(values.shape))


def test_latent_rounding_divides_truly_and_rounds_its_scale_to_e4m3(values):
    x = values.float().clamp(-2000, 2000).bfloat16()
    groups = x.float().view(-1, 16)
    amax = groups.abs().amax(1, keepdim=True).clamp_min(6 * 2.0**-9)
    scale = (amax / 6).clamp(max=448).to(torch.float8_e4m3fn).float()
    wanted = nearest_e2m1((groups / scale).clamp(-6, 6)) * scale
    assert torch.equal(round_fp4_latent(x), wanted.view(x.shape))


@pytest.mark.parametrize("rounding", [round_fp8, round_fp4_index, round_fp4_latent])
def test_what_comes_out_is_exact_in_bf16_and_keeps_its_zeros_sign(rounding, values):
    y = rounding(values)
    assert y.dtype == torch.float32
    assert torch.equal(y.bfloat16().float(), y)
    assert torch.equal(torch.signbit(y), torch.signbit(values))


@pytest.mark.parametrize("rounding", [round_fp8, round_fp4_index])
def test_rounding_again_changes_nothing(rounding, values):
    once = rounding(values)
    assert torch.equal(rounding(once), once)


def test_the_power_of_two_is_exact_at_powers_of_two():
    exponents = torch.arange(-126, 127)
    powers = torch.ldexp(torch.ones(253), exponents)
    above = torch.nextafter(powers, torch.tensor(torch.inf))
    assert torch.equal(e8m0.power_of_two_at_least(powers), powers)
    assert torch.equal(e8m0.power_of_two_at_least(above), powers * 2)
    assert torch.equal(e8m0.power_of_two_at_most(above), powers)


def test_the_ties_of_e2m1_go_to_even_codes():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    wanted = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    assert torch.equal(fp4.round_to_grid(ties), wanted)
    assert torch.equal(fp4.round_to_grid(-ties), -wanted)


def test_e4m3_rounding_equals_the_librarys_cast_for_every_midpoint():
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (grid[1:] + grid[:-1]) / 2
    near = [middle, torch.nextafter(middle, grid[1:]), torch.nextafter(middle, grid[:-1]), grid]
    x = torch.cat([*near, *(-v for v in near)])
    assert torch.equal(fp8.round_to_grid(x), x.to(torch.float8_e4m3fn).float())
    assert fp8.round_to_grid(torch.tensor([449.0, -1e9])).tolist() == [448.0, -448.0]
