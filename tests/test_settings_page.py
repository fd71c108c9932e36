from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from compute.config import ComputeConfig
from compute.frontend.config import FrontendConfig
from expert_daemon.config import DaemonConfig
from tests.support.settings_table import page

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"


def test_the_page_is_what_the_code_says():
    assert PAGE.read_text() == page(), (
        "run: python tests/support/settings_table.py > docs/settings.md"
    )


def test_every_field_of_every_process_has_its_row():
    sections = PAGE.read_text().split("\n## ")[1:]
    for section, config in zip(
        sections, (DaemonConfig, ComputeConfig, FrontendConfig), strict=True
    ):
        rows = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
        names = [field.name.removesuffix("_bytes") for field in fields(config)]
        names = [name for name in names if name != "settings_file"]  # where they all stand
        assert sorted(rows) == sorted(names)


def test_no_cell_is_empty():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert all(cell.strip() for row in rows for cell in row.strip("|").split("|"))
