"""expf, log1pf and the router's score: the C library's bits, from references and kernels."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.libm import exp_powers, expf, log1pf, softplus_sqrt
from kernels.reference import expf as reference_expf
from kernels.reference import log1pf as reference_log1pf
from kernels.reference import softplus_sqrt as reference_softplus_sqrt
from tests.support.libm_digests import BLOCK, FUNCTIONS, block_digest, committed

REFERENCES = {
    "expf": reference_expf.expf,
    "log1pf": reference_log1pf.log1pf,
    "softplus_sqrt": reference_softplus_sqrt.softplus_sqrt,
}
PROGRAM = 1 << 10  # inputs of one program on a device
# the inputs' upper byte, where each function changes its ways
TURNS = {
    "expf": (0x00, 0x3F, 0x41, 0x42, 0x7F, 0xC0, 0xC2, 0xFF),
    "log1pf": (0x2F, 0x31, 0x3E, 0x3F, 0x4B, 0x7F, 0x80, 0xBE, 0xBF),
    "softplus_sqrt": (0x41, 0x43, 0xC2),
}


@triton.jit
def _apply(v, powers, FUNCTION: tl.constexpr):
    entries = tl.load(powers + tl.arange(0, 32))
    if FUNCTION == "expf":
        return expf(v, entries)
    elif FUNCTION == "log1pf":  # noqa: RET505  an early return ends nothing while tracing
        return log1pf(v)
    else:
        return softplus_sqrt(v, entries)


@triton.jit
def _values_kernel(x, powers, out, FUNCTION: tl.constexpr, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + at, _apply(tl.load(x + at), powers, FUNCTION))


@triton.jit
def _digest_kernel(first, powers, out, FUNCTION: tl.constexpr, N: tl.constexpr):
    inputs = first.to(tl.int64) + tl.program_id(0) * N + tl.arange(0, N)
    results = _apply(inputs.to(tl.int32).to(tl.float32, bitcast=True), powers, FUNCTION)
    bits = tl.where(results == results, results.to(tl.int32, bitcast=True), 0x7FC00000)
    bits = bits.to(tl.uint32, bitcast=True).to(tl.uint64)
    mixed = ((inputs.to(tl.uint64) << 32) | bits) * 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9
    mixed = mixed ^ (mixed >> 32)
    tl.store(out + tl.program_id(0), tl.sum(mixed.to(tl.int64, bitcast=True), 0))


def digest_on(device: str, name: str, block: int, n_inputs: int, program: int) -> int:
    sums = torch.empty(n_inputs // program, dtype=torch.int64, device=device)
    powers = exp_powers(sums.device)
    _digest_kernel[sums.shape](
        block * BLOCK, powers, sums, FUNCTION=name, N=program, enable_fp_fusion=False
    )
    return int(sums.sum()) % 2**64


def from_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def same(found: Tensor, wanted: Tensor) -> bool:
    """Whether two f32 tensors have the same bits, every NaN being one."""
    nan = torch.isnan(wanted)
    bits = (found.cpu().view(torch.int32) == wanted.view(torch.int32)) | nan
    return bool(bits.all() and torch.equal(torch.isnan(found.cpu()), nan))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_references_give_the_librarys_bits_where_functions_turn(name: str) -> None:
    wanted = committed()[name]
    for block in TURNS[name]:
        assert block_digest(REFERENCES[name], block) == wanted[block], hex(block)


@pytest.mark.accept
@pytest.mark.parametrize("name", ["expf", "log1pf"])
def test_references_give_the_librarys_bits_for_every_input(name: str) -> None:
    wanted = committed()[name]
    assert [block_digest(REFERENCES[name], block) for block in range(256)] == wanted


@pytest.mark.accept
def test_scores_have_the_librarys_bits_wherever_softplus_bends() -> None:
    # elsewhere the score is one number, or the root of its argument, of which 0x43 has every kind
    wanted = committed()["softplus_sqrt"]
    for block in (*range(0x30, 0x44), *range(0xB0, 0xC4)):
        assert block_digest(REFERENCES["softplus_sqrt"], block) == wanted[block], hex(block)


def test_special_values_are_the_librarys() -> None:
    inf, nan = math.inf, math.nan
    x = torch.tensor([0.0, -0.0, inf, -inf, nan, -1.0, -2.0, 1e-45, 3e38, -200.0])
    found = {name: function(x).tolist() for name, function in REFERENCES.items()}
    assert found["expf"][:4] == [1.0, 1.0, inf, 0.0]
    assert found["expf"][7:] == [1.0, inf, 0.0]
    assert found["log1pf"][:3] == [0.0, 0.0, inf]
    assert math.copysign(1.0, found["log1pf"][1]) == -1.0
    assert found["log1pf"][5] == -inf
    assert found["log1pf"][7] == x[7]
    assert all(math.isnan(found["log1pf"][n]) for n in (3, 4, 6))
    assert found["softplus_sqrt"][2:4] == [inf, 0.0]
    assert math.isnan(found["softplus_sqrt"][4])


@pytest.mark.interpreter
@pytest.mark.parametrize("name", FUNCTIONS)
def test_interpreted_ports_equal_the_references_all_over(name: str) -> None:
    strided = torch.arange(-(2**31), 2**31, 65_521)[: 1 << 16]
    near = [b << 24 for b in TURNS[name]]
    corners = torch.tensor([c + d for c in near for d in range(-2048, 2048)])
    for bits in (strided, corners.repeat(16)[: 1 << 16]):
        x = from_bits(bits)
        out = torch.full_like(x, float("nan"))
        _values_kernel[(1,)](
            x, exp_powers(x.device), out, FUNCTION=name, N=x.numel(), enable_fp_fusion=False
        )
        assert same(out, REFERENCES[name](x))


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["expf", "log1pf"])
def test_an_interpreted_block_has_the_librarys_digest(name: str) -> None:
    block = TURNS[name][2]
    assert digest_on("cpu", name, block, BLOCK, 1 << 18) == committed()[name][block]


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_device_gives_the_librarys_bits_for_every_input(name: str) -> None:
    found = [digest_on("cuda", name, block, BLOCK, PROGRAM) for block in range(256)]
    assert found == committed()[name]


def test_digests_cover_every_block() -> None:
    assert all(len(set(rows)) == 256 for rows in committed().values())
