"""The kernels of the room, and what launches them, as its sources name them."""

from __future__ import annotations

import ast
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


def _functions(*, compiled: bool) -> dict[str, ast.FunctionDef]:
    """Return what Triton or Gluon compiles in kernels/, or all else, by "module.function"."""
    found = {}
    for path in sorted(KERNELS.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                decorators = {ast.unparse(one).split("(")[0] for one in node.decorator_list}
                if bool(decorators & {"triton.jit", "gluon.jit"}) == compiled:
                    found[f"{path.stem}.{node.name}"] = node
    return found


def _called(node: ast.FunctionDef) -> set[str]:
    """Return the plain names that a function calls."""
    calls = (part.func for part in ast.walk(node) if isinstance(part, ast.Call))
    return {function.id for function in calls if isinstance(function, ast.Name)}


def launchers() -> set[str]:
    """Return what runs either kernels or a reference, as "module.function"."""
    functions = _functions(compiled=False)
    return {name for name, node in functions.items() if "runs_kernels" in _called(node)}


def jit_kernels() -> set[str]:
    """Return every function of kernels/ that is launched, as "module.function".

    It is what is compiled and called by nothing else that is compiled.
    """
    functions = _functions(compiled=True)
    called = set().union(*map(_called, functions.values()))
    return {name for name, node in functions.items() if node.name not in called}
