"""The kernels of the room as its sources name them."""

from __future__ import annotations

import ast
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


def _functions() -> dict[str, ast.FunctionDef]:
    """Return what Triton or Gluon compiles in kernels/, by "module.function"."""
    found = {}
    for path in sorted(KERNELS.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                decorators = {ast.unparse(one).split("(")[0] for one in node.decorator_list}
                if decorators & {"triton.jit", "gluon.jit"}:
                    found[f"{path.stem}.{node.name}"] = node
    return found


def jit_kernels() -> set[str]:
    """Return every function of kernels/ that is launched, as "module.function".

    It is what is compiled and called by nothing else that is compiled.
    """
    functions = _functions()
    called = set()
    for node in functions.values():
        for part in ast.walk(node):
            if isinstance(part, ast.Call) and isinstance(part.func, ast.Name):
                called.add(part.func.id)
    return {name for name, node in functions.items() if node.name not in called}
