"""PTX of kernels with explicit layouts, compiled without a GPU, for `ptx_machine`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource


def gluon_ptx(kernel: Any, types: Mapping[str, str], n_warps: int, **constants: Any) -> str:
    """Return PTX for compute capability 9.0, pointers promised to be multiples of 16.

    types  of arguments by name, "*fp32" where none is given
    """
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "*fp32") for n in names}
    pointers = [i for i, n in enumerate(names) if signature[n].startswith("*")]
    source = GluonASTSource(
        kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in pointers},
    )
    options = {"num_warps": n_warps, "maxnreg": 128, "enable_fp_fusion": True}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return str(built.asm["ptx"])
