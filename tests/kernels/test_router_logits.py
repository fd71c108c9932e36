"""A router's logits: every body adds a logit's products one after another, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import triton
from torch import Tensor

from kernels import router_logits_layouts as layouts
from kernels.reference import router_logits as reference
from kernels.router_logits import FEW_ROWS, TILES, router_logits
from tests.support.gluon_ptx import gluon_ptx
from tests.support.ptx_machine import PtxMachine

BF16, F32 = torch.bfloat16, torch.float32
ROWS = (1, 2, 8, 9, 33)
# Experts and channels: odd ones, fewer than a program takes, more than a program's threads load.
SIZES = [(5, 64), (33, 100), (40, 37), (1, 8), (16, 516)]
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def case(rows: int, n: int, k: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    """A token's rows, bf16 values in f32, and a router's matrix."""
    generator = torch.Generator().manual_seed(rows * 1000 + n)
    x = torch.randn(rows, k, generator=generator).to(BF16).float()
    return x, torch.randn(n, k, generator=generator).to(dtype)


def chains(x: Tensor, weight: Tensor) -> Tensor:
    """The definition, channel by channel."""
    total = np.zeros((x.shape[0], weight.shape[0]), dtype=np.float32)
    left, right = x.float().numpy(), weight.float().numpy()
    with np.errstate(all="ignore"):
        for k in range(x.shape[1]):
            total = total + left[:, k, None] * right[None, :, k]
    assert total.dtype == np.float32
    return torch.from_numpy(total)


def same(found: Tensor, wanted: Tensor) -> bool:
    """Whether bits agree; a NaN is a NaN."""
    found, wanted = found.cpu(), wanted.cpu()
    equal = found.view(torch.int32) == wanted.view(torch.int32)
    return bool((equal | (found.isnan() & wanted.isnan())).all())


def extreme(k: int) -> tuple[Tensor, Tensor]:
    """Sums that overflow, cancel, stay below the least normal number, or are zeros of a sign."""
    x = torch.ones(2, k)
    weight = torch.zeros(8, k)
    weight[0] = 3e38
    weight[1, ::2], weight[1, 1::2] = 1e30, -1e30
    weight[2] = 1e-40
    weight[3] = -0.0
    weight[4, 0], weight[4, 1:] = 1.0, 2.0**-24  # each is lost, all together were not
    weight[5, -1], weight[5, :-1] = 1.0, 2.0**-24
    weight[6, 3], weight[6, 5] = float("inf"), float("-inf")
    weight[7, 2] = float("nan")
    x[1] = -1.5
    return x, weight


@pytest.mark.parametrize("rows", [1, 4, 5, 33])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_the_reference_is_the_definition(rows: int, dtype: torch.dtype) -> None:
    for n, k in (*SIZES, (384, 200), (3, 40_000)):
        x, weight = case(rows, n, k, dtype)
        assert same(reference.router_logits(x, weight), chains(x, weight))
        assert same(reference.router_logits(x.to(BF16), weight), chains(x, weight))


@pytest.mark.parametrize("rows", [2, 8])
def test_the_reference_adds_extreme_values_in_order(rows: int) -> None:
    x, weight = extreme(40)
    x = x.repeat(rows // 2, 1)
    with np.errstate(all="ignore"):
        found = reference.router_logits(x, weight)
    assert same(found, chains(x, weight))
    assert found[0, 4] == 1.0 and found[0, 5] > 1.0
    assert found[0, 3].view(torch.int32) == 0, "negative zeros alone give +0"


def test_the_order_of_channels_decides_bits() -> None:
    x, weight = case(1, 64, 512)
    backwards = reference.router_logits(x.flip(1), weight.flip(1))
    found = reference.router_logits(x, weight)
    assert torch.allclose(found, backwards, rtol=1e-4, atol=1e-4)
    assert (found != backwards).sum() > 16


def test_numpys_accumulate_gives_the_same() -> None:
    x, weight = case(3, 20, 300)
    products = x.numpy()[:, None] * weight.float().numpy()
    wanted = np.add.accumulate(products, axis=-1, dtype=np.float32)[..., -1]
    assert same(reference.router_logits(x, weight), torch.from_numpy(wanted.copy()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_bits_equal_the_reference(device: str, rows: int, dtype: torch.dtype) -> None:
    # Interpreted they take long: a kind of matrix meets each kind of row, at other numbers of them.
    kinds = (F32, BF16) if device == "cuda" else (F32 if rows % 2 == (dtype == F32) else BF16,)
    for n, k in SIZES:
        x, weight = case(rows, n, k, dtype)
        wanted = reference.router_logits(x, weight)
        for kind in kinds:
            for plain in (False, True) if device == "cuda" else (False,):
                out = torch.full((rows, n), float("nan"), device=device)
                given = x.to(kind).to(device)
                found = router_logits(given, weight.to(device), plain=plain, out=out)
                assert found is out
                assert same(out, wanted), (n, k, kind, plain)


@pytest.mark.parametrize("device", DEVICES)
def test_extreme_values_have_the_same_bits(device: str) -> None:
    for k in (40, 41):
        x, weight = extreme(k)
        for rows in (1, 2, 10):
            given = x.repeat(5, 1)[:rows]
            with np.errstate(all="ignore"):  # the interpreter's numbers are numpy's
                found = router_logits(given.to(device), weight.to(device))
            assert same(found, chains(given, weight))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("gap", [3, 4])
def test_rows_may_lie_apart(device: str, rows: int, gap: int) -> None:
    x, weight = case(rows, 7, 100)
    wide = torch.full((rows + 1, 100 + gap), float("nan"), device=device)
    wide[:, gap:] = 0
    wide[1:, gap:] = x.to(device)
    found = router_logits(wide[1:, gap:], weight.to(device))
    assert same(found, chains(x, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_the_released_routers_bits_at_every_number_of_rows(dtype: torch.dtype) -> None:
    x, weight = case(33, 384, 5120, dtype)
    wanted = reference.router_logits(x, weight)
    for rows in range(1, 34):
        for plain in (False, True):
            found = router_logits(x[:rows].cuda(), weight.cuda(), plain=plain)
            assert same(found, wanted[:rows]), (rows, plain)


@pytest.mark.gpu
def test_a_tokens_bits_do_not_depend_on_the_others() -> None:
    most = [rows for rows, _ in TILES[:-1]]
    x, weight = case(most[-1] + 7, 384, 5120)
    given, router = x.cuda(), weight.cuda()
    together = router_logits(given, router)
    parts = [(0, 1), (5, 1), (most[-1] + 6, 1), (3, FEW_ROWS), (9, FEW_ROWS + 1)]
    for first, rows in [*parts, *((7, rows) for rows in most)]:
        part = router_logits(given[first : first + rows], router)
        assert same(part, together[first : first + rows])


@pytest.mark.gpu
def test_rows_that_the_launch_before_writes_are_waited_for() -> None:
    x, weight = case(1, 384, 5120)
    wanted, router, row = reference.router_logits(x, weight), weight.cuda(), x.cuda()
    given, zeros = torch.zeros_like(row), torch.zeros_like(row)
    router_logits(given, router)  # compiled before it is captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = []
        for _ in range(20):
            given.copy_(zeros)
            router_logits(given, router)  # the next one's matrix is asked for beside it
            given.add_(row)
            kept.append(router_logits(given, router))
    graph.replay()
    assert all(same(found, wanted) for found in kept)


@pytest.fixture
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if triton.knobs.runtime.interpret:
        pytest.skip("the interpreter does not compile")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def on_the_machine(x: Tensor, weight: Tensor, rows: int, warps: int) -> Tensor:
    """What the kernel for a few rows leaves, compiled for a GPU and run on the CPU."""
    machine, (m, k), n = PtxMachine(), x.shape, weight.shape[0]
    is_bf16 = weight.dtype == BF16
    plan = layouts.RowPlan(k, is_bf16, rows, warps, layouts.TURN)
    bits = weight.view(torch.int16) if is_bf16 else weight
    at = [machine.place(part.numpy().tobytes()) for part in (x, bits)]
    at.append(machine.place(np.full(m * n + 1, np.nan, dtype=np.float32).tobytes()))
    types = {"weight": "*bf16" if is_bf16 else "*fp32", "n": "i32", "stride": "i32"}
    constants = layouts.constants(plan, joins=True)
    ptx = gluon_ptx(layouts._router_rows_kernel, types, warps, **constants)
    machine.run(ptx, [*at, n, k], (-(-n // rows), m), warps)
    found = torch.frombuffer(bytearray(machine.read(at[2], 4 * m * n + 4)), dtype=F32)
    assert found[-1].isnan(), "written behind the end"
    return found[:-1].view(m, n)


@pytest.mark.parametrize(
    ("m", "n", "k", "rows", "warps", "dtype"),
    [
        (1, 7, 64, 3, 2, BF16),
        (2, 5, 100, 2, 2, BF16),  # channels that do not fill a turn
        (1, 1, 4, 3, 1, BF16),
        (1, 9, 1284, 3, 1, BF16),  # more than a thread has on its way at once
        (1, 3, 1284, 3, 8, BF16),
        (1, 4, 300, 4, 1, F32),
        (2, 3, 516, 3, 1, F32),
    ],
)
@pytest.mark.usefixtures("_own_cache")
def test_a_thread_a_chain_on_the_cpu(
    m: int, n: int, k: int, rows: int, warps: int, dtype: torch.dtype
) -> None:
    x, weight = case(m, n, k, dtype)
    assert same(on_the_machine(x, weight, rows, warps), chains(x, weight))


@pytest.mark.usefixtures("_own_cache")
def test_a_thread_a_chain_of_extreme_values_on_the_cpu() -> None:
    x, weight = extreme(40)
    assert same(on_the_machine(x, weight, 3, 1), chains(x, weight))


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_the_matrix_alone_is_asked_for_before_the_kernel_ahead_is_joined(
    dtype: torch.dtype,
) -> None:
    plan = layouts.RowPlan(5120, dtype == BF16, layouts.ROWS, layouts.WARPS, layouts.TURN)
    before, after = layouts.chains(plan, joins=True).split("griddepcontrol.wait;")
    assert "ld.global.nc" in before
    assert "st." not in before and "ld.global.v" not in before and "ld.shared" not in before
    assert "ld.global.v4" in after and "ld.global.v4" not in after.split("bar.sync")[1]
    assert "griddepcontrol" not in layouts.chains(plan, joins=False)
    assert "fma" not in before + after


def test_which_matrices_fit() -> None:
    assert layouts.fits(torch.zeros(384, 5120, dtype=BF16))
    assert layouts.fits(torch.zeros(5, 5120))
    assert not layouts.fits(torch.zeros(8, 62, dtype=BF16))
    assert not layouts.fits(torch.zeros(8, 100_000, dtype=BF16))
    assert not layouts.fits(torch.zeros(8 * 64 + 1)[1:].view(8, 64))


def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.zeros(1, 64), torch.zeros(8, 64)
    with pytest.raises(ValueError, match="x is"):
        router_logits(torch.zeros(1, 32), weight)
    with pytest.raises(ValueError, match="x is"):
        router_logits(x.double(), weight)
    with pytest.raises(ValueError, match="x is"):
        router_logits(torch.zeros(64, 2).t(), weight)
    with pytest.raises(ValueError, match="weight is"):
        router_logits(x, weight.half())
    with pytest.raises(ValueError, match="weight is"):
        router_logits(x, torch.zeros(64, 8).t())
    with pytest.raises(ValueError, match=r"out \("):
        router_logits(x, weight, out=torch.zeros(1, 9))


def test_no_rows_give_none() -> None:
    assert router_logits(torch.zeros(0, 64), torch.zeros(8, 64)).shape == (0, 8)
