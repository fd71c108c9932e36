"""Shared memory that a kernel's PTX addresses by itself."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def reserve(SLICES: gl.constexpr, WARPS: gl.constexpr):
    """Allocate shared memory from `global_smem` on."""
    memory = gl.allocate_shared_memory(
        gl.int32, [SLICES, 1, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    line: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, WARPS], [1, 0])
    memory.index(SLICES - 1).store(gl.full([1, 64], 0, gl.int32, line))
