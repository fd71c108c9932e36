"""How many processors a process may keep busy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from compute.processors import n_processors

HERE = float(len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("outer", "inner", "wanted"),
    [
        ("max 100000", "50000 100000", 0.5),
        ("25000 100000", "max 100000", 0.25),
        ("25000 100000", "50000 100000", 0.25),
        ("max 100000", "max 100000", HERE),
        ("nonsense", "", HERE),
        ("100000000 100000", "max 100000", HERE),
    ],
)
def test_the_least_of_the_groups_counts(
    outer: str, inner: str, wanted: float, tmp_path: Path
) -> None:
    group = tmp_path / "slice" / "service"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text(inner + "\n")
    (group.parent / "cpu.max").write_text(outer + "\n")
    own = tmp_path / "own"
    own.write_text("1:name=systemd:/other\n0::/slice/service\n")
    assert n_processors(own, tmp_path) == wanted


def test_without_groups_it_is_where_it_may_run(tmp_path: Path) -> None:
    assert n_processors(tmp_path / "none", tmp_path) == HERE
    assert 0 < n_processors() <= HERE
