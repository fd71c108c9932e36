"""Kernels over rows copied in bulk, compiled for a GPU and run on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch import Tensor

from kernels import routed_m1_bulk as bulk
from kernels.formats import FORMATS
from kernels.formats.k_expert import BlockShape
from kernels.reference.q8_1_rows import dequantise, q8_1_rows
from kernels.routed_m1_blocks import fits_bulk
from tests.support.gluon_ptx import gluon_ptx
from tests.support.ptx_machine import PtxMachine
from tests.support.random_blocks import random_blocks

LIMIT = 10.0
TYPES = {
    "row": "*fp32", "codes": "*i32", "sides": "*i32", "out_codes": "*i8", "out_sides": "*i32",
    "pointers": "*i64", "n_experts": "i32", "limit": "fp32",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if triton.knobs.runtime.interpret:
        pytest.skip("the interpreter does not compile")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(kernel: Any, x: Tensor | None = None, **constants: Any) -> str:
    """Return the kernel's PTX where the token's row is x."""
    row = {"row": "*bf16"} if x is not None and x.dtype == torch.bfloat16 else {}
    return gluon_ptx(kernel, TYPES | row, constants["WARPS"], EARLY=True, **constants)


def matrix(machine: PtxMachine, name: str, n: int, k: int, seed: int) -> tuple[Tensor, int]:
    """Return a matrix by value, and where the machine has its blocks."""
    blocks = random_blocks(name, n, k, seed, 0.02)
    return FORMATS[name].dequantise(blocks).double(), machine.place(blocks.numpy().tobytes())


@pytest.mark.parametrize(
    ("hidden", "row_type"),
    [(1024, torch.float32), (2048, torch.bfloat16), (9216, torch.bfloat16)],
)
def test_gate_and_up_of_a_row(hidden: int, row_type: torch.dtype) -> None:
    machine, width = PtxMachine(), 32
    gate, gate_at = matrix(machine, "Q2_K", width, hidden, 3)
    up, up_at = matrix(machine, "Q2_K", width, hidden, 4)
    table = np.array([[0, gate_at, 0], [0, up_at, 0], [0, up_at, 0]])  # two experts are absent
    x = torch.randn(1, hidden, generator=torch.Generator().manual_seed(1))
    x = x.to(row_type)
    weights = torch.tensor([0.5, 0.7, 0.9])
    bf16_row = row_type == torch.bfloat16
    shape = BlockShape(hidden, 256, "Q2_K", "Q2_K", "Q3_K")
    constants = bulk.gate_up_constants(shape, bf16=False, bf16_row=bf16_row)
    constants = {**constants, "WIDTH_UNITS": 1}
    row = x.view(torch.int16) if bf16_row else x
    given = [table, weights.numpy(), row.numpy()]
    parameters = [machine.place(part.tobytes()) for part in given]
    out = [machine.place(bytes([0x77] * n)) for n in (384, 96)]
    limit = int(np.float32(LIMIT).view(np.uint32))
    ptx = compiled(bulk._bulk_gate_up_kernel, x, **constants)
    machine.run(ptx, [*parameters, *out, 3, limit], (1, 3), constants["WARPS"])
    found = torch.frombuffer(bytearray(machine.read(out[0], 384)), dtype=torch.int8)
    sides = torch.frombuffer(bytearray(machine.read(out[1], 96)), dtype=torch.int32)
    assert found[:128].eq(0x77).all() and found[256:].eq(0x77).all()
    rounded = dequantise(*q8_1_rows(x), hidden)[0].double()
    g, u = (gate @ rounded).float().clamp(max=LIMIT), (up @ rounded).float().clamp(-LIMIT, LIMIT)
    codes, wanted = q8_1_rows((torch.nn.functional.silu(g) * u * 0.7)[None])
    assert g.norm() > 0
    apart = found[128:256].view(8, 1, 16)[:2].int() - codes[0, :2].int()
    assert apart.abs().max() <= 1
    assert apart.count_nonzero() <= 1  # a tie may round the other way
    scale = sides[8:].view(torch.float32)[0]
    assert torch.isclose(scale, wanted.view(torch.float32)[0, 0, 0], rtol=1e-6)
    sums = found[128:160].view(2, 16).int().sum(1)
    assert sides[12] == int(sums[0]) & 0xFFFF | int(sums[1]) << 16


@pytest.mark.parametrize("width", [256, 512, 768, 2304, 4352])
def test_down_of_any_number_of_blocks(width: int) -> None:
    machine, hidden = PtxMachine(), 64
    down, at = matrix(machine, "Q3_K", hidden, width, 5)
    pointers = machine.place(np.array([[0, 0], [0, 0], [0, at]]).tobytes())
    activated = torch.randn(2, width, generator=torch.Generator().manual_seed(2))
    codes, sides = q8_1_rows(activated)
    row = [machine.place(part.numpy().tobytes()) for part in (codes, sides)]
    out = machine.place(np.full(2 * hidden, np.nan, dtype=np.float32).tobytes())
    shape = BlockShape(hidden, width, "Q2_K", "Q2_K", "Q3_K")
    constants = bulk.down_constants(shape, bf16=False)
    ptx = compiled(bulk._bulk_down_kernel, **constants)
    machine.run(ptx, [pointers, *row, out, 2], (1, 2), constants["WARPS"])
    found = torch.frombuffer(bytearray(machine.read(out, 8 * hidden)), dtype=torch.float32)
    wanted = down @ dequantise(codes, sides, width)[1].double()
    assert found[:hidden].isnan().all()
    assert (found[hidden:] - wanted).norm() <= 1e-6 * wanted.norm()


def test_the_largest_values_do_not_overflow() -> None:
    machine, hidden, width = PtxMachine(), 64, 256
    blocks = torch.full((hidden, 110), 0xFF, dtype=torch.uint8)
    blocks[:, 108:] = torch.tensor([1.0]).half().view(torch.uint8)
    blocks[::2, :96] = 0  # -4 each
    blocks[::3, 96:108] = 0  # scales of -32
    at = machine.place(blocks.numpy().tobytes())
    pointers = machine.place(np.array([[0], [0], [at]]).tobytes())
    codes, sides = q8_1_rows(torch.full((1, width), 127.0))
    row = [machine.place(part.numpy().tobytes()) for part in (codes, sides)]
    out = machine.place(bytes(4 * hidden))
    shape = BlockShape(hidden, width, "Q2_K", "Q2_K", "Q3_K")
    constants = bulk.down_constants(shape, bf16=False)
    ptx = compiled(bulk._bulk_down_kernel, **constants)
    machine.run(ptx, [pointers, *row, out, 1], (1, 1), constants["WARPS"])
    found = torch.frombuffer(bytearray(machine.read(out, 4 * hidden)), dtype=torch.float32)
    assert torch.equal(found, FORMATS["Q3_K"].dequantise(blocks).float().sum(1) * 127)


def test_which_experts_fit() -> None:
    released = BlockShape(5120, 2304, "Q2_K", "Q2_K", "Q3_K")
    assert fits_bulk(released)
    assert not fits_bulk(BlockShape(5120, 2304, "Q4_K", "Q4_K", "Q4_K"))
    assert not fits_bulk(BlockShape(1280, 768, "Q2_K", "Q2_K", "Q3_K"))
    assert not fits_bulk(BlockShape(11264, 2304, "Q2_K", "Q2_K", "Q3_K"))
