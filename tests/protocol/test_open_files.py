from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol import open_files
from protocol.open_files import descriptor_limit, raise_descriptor_limit

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def hard() -> Iterator[int]:
    """The hard limit; the soft one is put back after the test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_is_raised_to_the_hard_one(
    hard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_files, "MOST_DESCRIPTORS", 1 << 30)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    assert descriptor_limit() == 256
    assert raise_descriptor_limit() == descriptor_limit() == hard
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)


def test_the_limit_is_raised_no_further_than_is_sensible(
    hard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_files, "MOST_DESCRIPTORS", 300)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    assert raise_descriptor_limit() == 300
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, hard)


def test_a_limit_that_is_higher_already_is_left(hard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "MOST_DESCRIPTORS", 128)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    assert raise_descriptor_limit() == 128
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (256, hard)


def test_no_limit_at_all_counts_as_the_sensible_one(monkeypatch: pytest.MonkeyPatch) -> None:
    infinite = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: (infinite, infinite))
    assert raise_descriptor_limit() == open_files.MOST_DESCRIPTORS


STARTED = """
import resource, sys
from importlib import import_module
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 256), hard))
print(import_module(sys.argv[1]).main(["--config", "/nonexistent/settings.toml"]))
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize("service", ["expert_daemon", "compute", "compute.frontend"])
def test_each_service_raises_its_limit_as_it_starts(hard: int, service: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STARTED, f"{service}.__main__"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    status, soft = map(int, ended.stdout.split())
    assert status != 0
    assert soft == min(hard, open_files.MOST_DESCRIPTORS) > 256
