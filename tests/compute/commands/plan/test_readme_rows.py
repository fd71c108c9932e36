"""The README's hit rates by size of the arena are what the traces they come from give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from compute.commands.plan.curve import curve_hits
from protocol.sizes import parse_size

ROW = re.compile(r"^\| (\d+ GiB) \| (\d+) % \| (\d+) % \| (\d+) \| ([\d.]+) GB \|$", re.MULTILINE)
N_KEYS, EXPERT_BYTES, PICKS = 40 * 384, 18_800_640, 40 * 6


def test_each_row_is_what_the_curve_says(root: Path):
    rows = ROW.findall((root / "README.md").read_text())
    assert "96 GiB" in [row[0] for row in rows]
    for size, *figures in rows:
        share, hits, n_reads, gigabytes = map(float, figures)
        resident = parse_size(size.replace(" ", ""), size) / (N_KEYS * EXPERT_BYTES)
        found = curve_hits(resident, 0, is_cold=False)
        assert share == pytest.approx(100 * resident, abs=1)
        assert hits == pytest.approx(100 * found.rate, abs=1)
        assert n_reads == pytest.approx(PICKS * found.miss, abs=1)
        assert gigabytes == pytest.approx(n_reads * EXPERT_BYTES / 1e9, abs=0.05)
