from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PART = "not gpu and not accept and not interpreter"
TEXT = {".py", ".toml", ".md", ".txt", ".cfg", ".in", ""}
# Written in halves, so that this file does not hold what it looks for.
REGISTRY_HOSTS = (
    "pypi" + ".org",
    "python" + "hosted",
    "download.py" + "torch",
    "index-url " + "http",
)


def make_plan(target: str) -> list[str]:
    """The commands that `make target` would run, set-up left out."""
    command = ["make", "--dry-run", "--no-print-directory", "--old-file=.venv/.ready", target]
    # A make that runs these tests hands its variables on (make test ARGS=...).
    environment = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME")}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return [line for line in done.stdout.splitlines() if line.startswith(".venv/bin/")]


def test_check_in_runs_what_make_test_runs():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    commands = [line for line in lines if not line.startswith(("#", "set ", "cd "))]
    assert [line.partition(" #")[0] for line in commands] == [".ci/tools || true", "exec make test"]


@pytest.mark.parametrize(
    ("apt_get", "words"),
    [
        ("sleep 60", r"no chromium after [23] s"),  # a mirror that says nothing
        ("exit 100", r"no chromium after [01] s"),  # no network
        ("case $* in *download*) ;; *' install '*) exit 1;; esac", r"no systemd after [01] s"),
        ("exit 0", ""),
    ],
)
def test_tools_that_cannot_be_installed_neither_fail_nor_hold_up_a_check_in(
    tmp_path: Path, apt_get: str, words: str
):
    for name in ("bash", "timeout", "sleep", "env"):
        (tmp_path / name).symlink_to(shutil.which(name) or pytest.fail(name))
    for name, script in (("apt-get", apt_get), ("id", "echo 0")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    began = time.monotonic()
    done = subprocess.run(
        [ROOT / ".ci" / "tools", "2"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 15
    assert "installs the Debian packages systemd chromium, in 2 s at most" in done.stdout
    # A whole second may end in between.
    assert re.search(words, done.stdout) if words else done.stdout.count("\n") == 1


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_make_test_checks_format_rules_types_contracts_and_tests():
    plan = [line.removeprefix(".venv/bin/").strip() for line in make_plan("test")]
    assert plan == [
        "ruff format --check .",
        "ruff check .",
        "mypy",
        "lint-imports --no-logo",
        f"pytest -n 2 --dist worksteal -m '{PART} and not timing'",
        f"pytest -m '{PART} and timing'",
    ]


def test_what_make_test_leaves_out_is_what_plain_pytest_leaves_out():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]
    assert settings["ini_options"]["addopts"][-2:] == ["-m", PART]


def test_no_file_names_a_package_registry():
    tops = [".ci", "bench", "compute", "deploy", "demo", "expert_daemon", "kernels", "protocol"]
    files = [path for top in [*tops, "tests"] for path in (ROOT / top).rglob("*")]
    files += [path for path in ROOT.iterdir() if path.is_file()]
    for path in files:
        if path.is_file() and path.suffix in TEXT and "__pycache__" not in path.parts:
            text = path.read_text()
            assert [host for host in REGISTRY_HOSTS if host in text] == [], path


def test_torch_is_no_cuda_build_where_no_gpu_is():
    torch = pytest.importorskip("torch")
    smi = shutil.which("nvidia-smi")
    if smi and subprocess.run([smi, "-L"], capture_output=True, check=False).returncode == 0:
        pytest.skip("this machine has a GPU")
    assert torch.version.cuda is None, (
        f"torch {torch.__version__} is a CUDA build of several gigabytes on a machine without an "
        "NVIDIA GPU: `make clean`, then `make test`, which asks for torch==2.13.0, or "
        "`make TORCH_INDEX=URL` with an index of CPU builds"
    )
