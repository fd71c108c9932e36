"""What every test may ask for: a short runtime directory, the folders of the data, few threads."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

# Before torch or a BLAS is loaded, here and in child processes: more threads than the tiny models
# can feed make them slower, and the test processes run beside each other.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, str(min(2, os.cpu_count() or 1)))

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
