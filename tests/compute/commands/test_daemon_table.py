from __future__ import annotations

from pathlib import Path

import pytest

from compute.commands.daemon_table import daemon_flags
from expert_daemon.config import load_config
from protocol.errors import ConfigError


def test_the_table_is_what_a_child_is_told(tmp_path: Path):
    file = tmp_path / "headrace.toml"
    file.write_text(
        'model = "demo"\nchunk = 9\nread_threads = 3\n[compute]\nseed = 1\n'
        '[daemon]\nmodel = "other"\narena = "1GiB"\nno_save = true\nbatch = 2\n'
        "allowed_uids = [7, 8]\n"
    )
    flags = daemon_flags(file)
    assert "--model" not in flags
    config = load_config([*flags, "--model", "demo", "--runtime-dir", str(tmp_path)], {})
    assert (config.arena_bytes, config.no_save, config.batch) == (1 << 30, True, 2)
    assert config.allowed_uids == (7, 8)
    assert "--read-threads" not in flags


def test_no_file_is_no_flag():
    assert daemon_flags(None) == []


def test_a_key_that_the_daemon_does_not_know_is_refused(tmp_path: Path):
    file = tmp_path / "headrace.toml"
    file.write_text("[daemon]\nseed = 1\n")
    with pytest.raises(ConfigError, match="unknown key 'seed'"):
        daemon_flags(file)
