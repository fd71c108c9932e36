from __future__ import annotations

from pathlib import Path

import pytest

from protocol.errors import ConfigError
from protocol.settings_file import read_settings

TEXT = """
model = "/m"
chunk = 7
[daemon]
arena = "1GiB"
[compute]
chunk = 9
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "headrace.toml"
    path.write_text(TEXT)
    return path


def test_a_process_reads_the_top_and_its_own_table(file: Path):
    assert read_settings(file, "daemon", ("model", "arena"), ("chunk",)) == {
        "model": ("/m", f"{file}: model"),
        "arena": ("1GiB", f"{file}: daemon.arena"),
    }


def test_its_own_table_wins(file: Path):
    found = read_settings(file, "compute", ("model", "chunk"))
    assert found["chunk"] == (9, f"{file}: compute.chunk")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed = 9", "unknown key 'speed'; known are model, arena, chunk"),
        ("[daemon]\nchunk = 9", "[daemon]: unknown key 'chunk'; known are model, arena"),
        ("daemon = 3", "daemon is 3, wanted a table: [daemon]"),
        ("[other]\nx = 1", "unknown key 'other'"),
        ("model = ", "cannot be read as TOML"),
    ],
)
def test_what_no_process_knows_is_refused(file: Path, text: str, message: str):
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_settings(file, "daemon", ("model", "arena"), ("chunk",))
    assert message in str(caught.value)
    assert str(file) in str(caught.value)


def test_the_tables_of_other_processes_are_left_unread(file: Path):
    file.write_text("[frontend]\nanything = 1\n")
    assert read_settings(file, "daemon", ("model",)) == {}
