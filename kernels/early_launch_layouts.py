"""`early_launch.join_previous` for kernels with explicit layouts."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def join_previous(EARLY: gl.constexpr):
    """Wait until the kernel before has ended, then let the kernel after begin."""
    if EARLY:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
