from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTRACTS = {contract["id"] for contract in PROJECT["tool"]["importlinter"]["contracts"]}

# contract, file that breaks it, what stands in that file
VIOLATIONS = [
    ("protocol", "protocol/wire/bad.py", "import compute"),
    ("protocol", "protocol/bad.py", "import torch"),
    ("protocol", "protocol/files/bad.py", "def late():\n    import kernels"),
    ("kernels", "kernels/bad.py", "import protocol"),
    ("kernels", "kernels/reference/bad.py", "import compute"),
    ("expert_daemon", "expert_daemon/bad.py", "import torch"),
    ("expert_daemon", "expert_daemon/bad.py", "import triton"),
    ("expert_daemon", "expert_daemon/bad.py", "import kernels"),
    ("expert_daemon", "expert_daemon/bad.py", "from compute import model"),
    ("daemon-importers", "compute/model/bad.py", "import expert_daemon"),
    ("daemon-importers", "compute/bad.py", "def late():\n    import expert_daemon"),
    ("commands-importers", "compute/bad.py", "import compute.commands"),
    ("kernels-importers", "protocol/bad.py", "import kernels"),
    ("frontend", "compute/frontend/bad.py", "import torch"),
    ("frontend", "compute/frontend/bad.py", "from compute import heavy"),
    ("msgpack", "protocol/wire/bad.py", "import msgpack"),
    ("msgpack", "expert_daemon/bad.py", "import msgpack"),
    ("recipe", "compute/frontend/bad.py", "import deepseek_recipe"),
    ("command-line", "compute/bad.py", "import headrace"),
    ("demo", "compute/bad.py", "import demo.train_demo"),
]
# Allowed by the table, so no contract may fall.
PERMITTED = [
    ("compute/commands/good.py", "import expert_daemon, kernels, protocol, torch"),
    ("compute/commands/completion.py", "import headrace"),
    ("compute/frontend/good.py", "import tokenizers"),
    ("protocol/wire/codec.py", "import msgpack"),
    ("compute/frontend/encoding/recipe.py", "import deepseek_recipe"),
    ("expert_daemon/good.py", "import protocol.wire.codec"),
    ("compute/model/good.py", "import kernels.reference, torch"),
]


@pytest.fixture
def skeleton(tmp_path: Path) -> Path:
    """The rooms with their packages and no modules, plus one module of compute that loads torch."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in PROJECT["tool"]["setuptools"]["packages"]:
        folder = tmp_path.joinpath(*package.split("."))
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
    (tmp_path / "demo" / "train_demo.py").touch()
    (tmp_path / "compute" / "heavy.py").write_text("import torch\n")
    return tmp_path


def lint(tree: Path, *contracts: str) -> subprocess.CompletedProcess[str]:
    program = "from importlinter.cli import lint_imports_command as main; main()"
    command = [sys.executable, "-c", program, "--no-cache", "--no-logo"]
    for contract in contracts:
        command += ["--contract", contract]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)


def test_every_contract_has_a_violation_here():
    assert {contract for contract, _, _ in VIOLATIONS} == CONTRACTS


@pytest.mark.parametrize(("contract", "path", "text"), VIOLATIONS)
def test_contract_falls_when_it_is_violated(skeleton: Path, contract: str, path: str, text: str):
    (skeleton / path).write_text(text + "\n")
    done = lint(skeleton, contract)
    assert done.returncode == 1, done.stdout
    assert "0 kept, 1 broken" in done.stdout


def test_what_the_table_permits_breaks_no_contract(skeleton: Path):
    for path, text in PERMITTED:
        (skeleton / path).write_text(text + "\n")
    done = lint(skeleton)
    assert done.returncode == 0, done.stdout
    assert f"{len(CONTRACTS)} kept, 0 broken" in done.stdout
