from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import headrace
from compute import config as compute_config
from compute.commands.children import DaemonChild, daemon_in_use
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


def test_a_private_daemon_takes_no_address_and_no_trace(tmp_path: Path):
    file = tmp_path / "headrace.toml"
    file.write_text('[daemon]\narena = "1GiB"\nmetrics = "127.0.0.1:9464"\ntrace = "/t"\n')
    assert daemon_flags(file, private=True) == ["--arena", "1GiB"]


@pytest.mark.parametrize("command", ["generate", "chat", "eval", "bench"])
def test_a_command_reads_its_table_and_hands_the_daemons_on(command, tmp_path, monkeypatch):
    """Of one file: `[compute]` for itself, `[daemon]` for a daemon that it starts."""
    file = tmp_path / "headrace.toml"
    file.write_text(
        'model = "demo"\n[daemon]\narena = "200KB"\n[compute]\ncontext = 99\n[frontend]\nport = 1\n'
    )
    given = ["--text", "README.md"] if command == "eval" else []
    args = headrace.build_parser([command]).parse_args([command, "--config", str(file), *given])
    config = compute_config.load_config(args, {})
    assert (config.context, config.settings_file) == (99, file)
    started: list[list[str]] = []
    monkeypatch.setattr(DaemonChild, "start", lambda self: started.append(self._arguments))
    place = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with daemon_in_use(config, tmp_path, place):
        assert started == [["--arena", "200KB", "--model", str(tmp_path)]]
    with daemon_in_use(replace(config, arena=3_000_000), tmp_path, place):
        assert load_config(started[1], place).arena_bytes == 3_000_000
