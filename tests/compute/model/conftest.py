from pathlib import Path

import pytest

from tests.support.golden_files import read_ids
from tests.support.local_model import LocalModel


@pytest.fixture(scope="session")
def tiny(tiny_dir: Path) -> LocalModel:
    return LocalModel(tiny_dir)


@pytest.fixture(scope="session")
def tiny_ids(tiny_dir: Path) -> list[int]:
    return read_ids(tiny_dir)


@pytest.fixture(scope="session")
def demo(demo_dir: Path) -> LocalModel:
    return LocalModel(demo_dir)
