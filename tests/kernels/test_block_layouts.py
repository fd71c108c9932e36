"""Kernels with explicit layouts over blocks, compiled for a GPU and run on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import triton

from kernels import gemv_blocks_layouts as gemv_layouts
from kernels import routed_m1_block_layouts as routed_layouts
from kernels.block_words import UNITS
from kernels.formats.k_expert import BlockShape
from kernels.reference import gemv_blocks as gemv_reference
from kernels.reference import routed_m1 as routed_reference
from kernels.reference.q8_1_rows import q8_1_rows
from tests.support.gluon_ptx import gluon_ptx
from tests.support.ptx_machine import PtxMachine
from tests.support.random_blocks import random_blocks

TYPES = {
    "codes": "*i32", "sides": "*i32", "weight": "*u8", "out_codes": "*i8", "out_sides": "*i32",
    "pointers": "*i64", "n": "i32", "rows_a_group": "i32", "groups": "i32", "n_experts": "i32",
    "limit": "fp32",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if triton.knobs.runtime.interpret:
        pytest.skip("the interpreter does not compile")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "n", "k", "groups"),
    [
        ("Q2_K", 16, 1280, 1),
        ("Q3_K", 32, 768, 2),
        ("Q3_K", 4, 2048, 1),
        ("Q4_K", 16, 768, 1),
        ("Q6_K", 8, 1024, 1),
        ("Q8_0", 16, 512, 1),
        ("Q2_K", 8, 5632, 1),  # more steps than are unrolled
    ],
)
def test_a_matrix_of_blocks_times_two_rows(name: str, n: int, k: int, groups: int) -> None:
    weight = random_blocks(name, n, k)
    x = torch.randn(2, groups * k, generator=torch.Generator().manual_seed(1))
    tile = gemv_layouts.matrix_tiling(n, n // groups, k, name)
    ptx = gluon_ptx(
        gemv_layouts._gemv_blocks_kernel, TYPES, tile.warps,
        **gemv_layouts.constants(weight, name, tile),
    )  # fmt: skip
    machine = PtxMachine()
    codes, sides = q8_1_rows(x.view(-1, k))
    parameters = [machine.place(t.numpy().tobytes()) for t in (codes, sides, weight)]
    out = machine.place(np.full(2 * n, np.nan, dtype=np.float32).tobytes())
    machine.run(ptx, [*parameters, out, n, n // groups, groups], (2, n // tile.rows), tile.warps)
    found = torch.frombuffer(bytearray(machine.read(out, 8 * n)), dtype=torch.float32).view(2, n)
    wanted = gemv_reference.gemv_blocks(x, weight, name, groups)
    assert (found - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.parametrize(
    ("formats", "hidden", "width"),
    [(("Q2_K", "Q2_K", "Q3_K"), 1024, 256), (("Q8_0", "Q4_K", "Q6_K"), 512, 256)],
)
def test_routed_experts_of_which_one_is_absent(
    formats: tuple[str, str, str], hidden: int, width: int
) -> None:
    shape, machine = BlockShape(hidden, width, *formats), PtxMachine()
    sizes = ((width, hidden), (width, hidden), (hidden, width))
    matrices = [random_blocks(f, *s, 3, 0.003) for f, s in zip(formats, sizes, strict=True)]
    table = np.zeros((3, 2), dtype=np.int64)  # the first expert is absent
    table[:, 1] = [machine.place(matrix.numpy().tobytes()) for matrix in matrices]
    x, weights = torch.randn(1, hidden), torch.tensor([0.5, 0.7])
    row = [machine.place(part.numpy().tobytes()) for part in q8_1_rows(x)]
    activated = [machine.place(bytes(2 * width)), machine.place(bytes(2 * width // 4))]
    parts = machine.place(bytes(8 * hidden))
    pointers = machine.place(table.tobytes())
    limit = int(np.float32(10.0).view(np.uint32))
    tile, constants = routed_layouts.gate_up_constants(shape, bf16=False)
    machine.run(
        gluon_ptx(routed_layouts._gate_up_kernel, TYPES, tile.warps, **constants),
        [pointers, machine.place(weights.numpy().tobytes()), *row, *activated, 2, limit],
        (width // 32, 2), tile.warps,
    )  # fmt: skip
    tile, constants = routed_layouts.down_constants(shape, bf16=False)
    machine.run(
        gluon_ptx(routed_layouts._down_kernel, TYPES, tile.warps, **constants),
        [pointers, *activated, parts, 2], (hidden // tile.rows, 2), tile.warps,
    )  # fmt: skip
    data = bytearray(machine.read(parts, 8 * hidden))
    found = torch.frombuffer(data, dtype=torch.float32).view(2, hidden)
    host = torch.tensor([[0, matrix.data_ptr()] for matrix in matrices])
    wanted = routed_reference.routed_m1(x, host, weights, shape, 10.0, torch.float32)
    assert not found[0].any()
    assert (found[1] - wanted).norm() <= 1e-3 * wanted.norm()  # a tie may round the other way


def test_every_format_has_a_layout_test() -> None:
    assert set(UNITS) == {"Q2_K", "Q3_K", "Q4_K", "Q6_K", "Q8_0"}
