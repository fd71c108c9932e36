"""What every test may ask for: a short runtime directory, the folders of the data, few threads."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from kernels.reference.one_order import ask_for_one_order

ROOT = Path(__file__).resolve().parents[1]

# Before torch or a BLAS is loaded, here and in child processes. The models of the tests are too
# small for several threads, and threads that spin while they wait starve the daemon beside them:
# on two busy cores that was a hundredth of the speed.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
ask_for_one_order()  # a test's own product may come before the model's

# Child processes start as installed programs do: a daemon compiles its modules for 0.3 s at 2 GHz.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shared machine is slow at times; a test's own time limit stands beside this.
settings.register_profile("headrace", deadline=None)
settings.load_profile("headrace")


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A private directory whose path is short enough for a socket, removed after the test."""
    directory = Path(tempfile.mkdtemp(prefix="hr-", dir="/tmp"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """An empty state directory of the test's own."""
    directory = tmp_path / "state"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the source tree."""
    return ROOT


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    """The demo model's folder in the source tree."""
    return ROOT / "demo"


@pytest.fixture(scope="session")
def tiny_dir() -> Path:
    """The tiny V4.1 checkpoint with its golden data."""
    return ROOT / "tests" / "data" / "v41-tiny"
