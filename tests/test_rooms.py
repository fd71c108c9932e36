from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("protocol", "kernels", "expert_daemon", "compute", "demo")
WIRE = {"numpy", "zmq", "msgpack", "xxhash"}
ALLOWED = {
    "protocol": WIRE,
    "kernels": {"torch", "triton"},
    "expert_daemon": {"protocol", "numpy", "zmq", "xxhash", "uvloop", "prometheus_client"},
    "compute": {"protocol", "kernels", "numpy", "torch", "zmq", "tokenizers", "rich", "uvloop"},
    "compute/frontend": {
        *("protocol", "numpy", "zmq", "tokenizers", "rich", "uvloop"),
        *("deepseek_recipe", "jinja2"),
        *("compute", "starlette", "uvicorn", "prometheus_client"),
    },
    "compute/commands": {
        *("protocol", "kernels", "expert_daemon", "compute", "demo", "headrace"),
        *("numpy", "torch", "zmq", "matplotlib", "tokenizers", "rich", "shtab", "uvloop"),
    },
}


def imported_names(path: Path, *, top_level_only: bool = False) -> Iterator[str]:
    """The first part of every absolute import in the file, those inside functions included."""
    tree = ast.parse(path.read_text())
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            assert node.module is not None
            yield node.module.split(".")[0]


def modules_of(folder: str) -> list[Path]:
    nested = [ROOT / name for name in ALLOWED if name.startswith(folder + "/")]
    return [
        path
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not any(path.is_relative_to(other) for other in nested)
    ]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("folder", ALLOWED)
def test_room_imports_only_what_it_may(folder: str):
    allowed = ALLOWED[folder] | {folder.partition("/")[0]} | sys.stdlib_module_names
    strangers = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules_of(folder)
        for name in imported_names(path)
        if name not in allowed
    }
    assert strangers == set()


@pytest.mark.parametrize("room", ROOMS)
def test_room_is_ours_and_not_another_distribution(room: str):
    spec = importlib.util.find_spec(room)
    remedy = (
        f"`{room}` is not headrace's folder {ROOT / room}. Another distribution of that name is "
        f"in the way: `pip uninstall {room}` in this environment, then `pip install -e .` "
        "in headrace's folder (or `make clean test`)."
    )
    assert spec is not None, remedy
    assert spec.origin is not None, remedy
    assert Path(spec.origin).resolve().parent == ROOT / room, f"{remedy} Found: {spec.origin}"
    owners = set(importlib.metadata.packages_distributions().get(room, ()))
    assert owners <= {"headrace"}, f"{remedy} Held by: {sorted(owners)}"


def test_command_line_imports_only_the_standard_library_until_it_is_called():
    names = set(imported_names(ROOT / "headrace.py", top_level_only=True))
    assert names <= set(sys.stdlib_module_names)


def loaded_after_importing(modules: list[str]) -> set[str]:
    """The top-level packages in a fresh interpreter's sys.modules after these imports."""
    program = (
        "import importlib, json, sys\n"
        "for name in json.loads(sys.argv[1]): importlib.import_module(name)\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(modules)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("folder", "never"),
    [
        ("protocol", {"torch", "triton", "tokenizers", "rich", "uvloop"}),
        ("expert_daemon", {"torch", "triton", "tokenizers", "rich", "kernels", "compute"}),
        ("compute/frontend", {"torch", "triton", "kernels", "expert_daemon"}),
        ("compute/commands", {"torch", "triton", "kernels", "expert_daemon"}),
    ],
)
def test_importing_every_module_of_a_room_loads_no_heavy_package(folder: str, never: set[str]):
    modules = [module_name(path) for path in modules_of(folder) if path.name != "__main__.py"]
    assert loaded_after_importing(modules) & never == set()


def test_importing_the_command_line_loads_no_room():
    assert loaded_after_importing(["headrace"]) & {*ROOMS, "torch", "zmq", "numpy"} == set()


def test_expert_client_comes_from_headrace_without_torch():
    program = (
        "import sys; from headrace import ExpertClient;"
        "assert ExpertClient.__module__.startswith('protocol.wire'), ExpertClient.__module__;"
        "assert not {'torch', 'triton', 'compute', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
