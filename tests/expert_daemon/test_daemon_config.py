from __future__ import annotations

from pathlib import Path

import pytest

from expert_daemon.config import DaemonConfig, load_config
from protocol.errors import ConfigError

BASE = ["--model", "m", "--runtime-dir", "/run/x", "--state-dir", "/var/x"]


def test_defaults_hold_where_nothing_is_said():
    config = load_config(BASE, {})
    assert config == DaemonConfig(model="m", runtime_dir=Path("/run/x"), state_dir=Path("/var/x"))
    assert config.socket_path == Path("/run/x/expertd.sock")


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path):
    file = tmp_path / "d.toml"
    file.write_text('arena = "1GiB"\nread_threads = 3\npolicy = "lru"\nbatch = 2\n')
    environment = {"HEADRACE_READ_THREADS": "4", "HEADRACE_POLICY": "lfu-da", "HEADRACE_BATCH": ""}
    config = load_config([*BASE, "--config", str(file), "--policy", "lru"], environment)
    assert config.arena_bytes == 1 << 30
    assert config.read_threads == 4
    assert config.policy == "lru"
    assert config.batch == 2


def test_the_environment_alone_suffices(tmp_path):
    environment = {
        "HEADRACE_MODEL": "demo",
        "HEADRACE_ARENA": "96GiB",
        "HEADRACE_ARENA_MAX": "128GiB",
        "XDG_RUNTIME_DIR": "/run/user/7",
        "XDG_STATE_HOME": "/home/u/.state",
    }
    config = load_config([], environment)
    assert config.arena_bytes == 96 << 30
    assert config.arena_max_bytes == 128 << 30
    assert config.state_dir == Path("/home/u/.state/headrace")


def test_systemd_gives_the_state_directory():
    config = load_config(BASE[:4], {"STATE_DIRECTORY": "/var/lib/headrace"})
    assert config.state_dir == Path("/var/lib/headrace")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('aren = "1GiB"', "unknown key 'aren'"),
        ('arena = "lots"', "arena: 'lots'"),
        ("arena = true", "arena: True"),
        ("read_threads = 0", "read_threads"),
        ("read_threads = 1.5", "read_threads"),
        ('policy = "fifo"', "lfu-da"),
        ('read_mode = "mmap"', "direct"),
        ("model = 7", "model"),
        ('runtime_dir = ""', "runtime_dir"),
        ('allowed_uids = ["x"]', "allowed_uids"),
        ("arena = ", "TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path, text, word):
    file = tmp_path / "d.toml"
    file.write_text(text + "\n")
    with pytest.raises(ConfigError, match=r"d\.toml") as caught:
        load_config([*BASE[:2], "--config", str(file)], {"XDG_RUNTIME_DIR": "/run/u"})
    assert word in str(caught.value)


def test_a_missing_file_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"/none\.toml"):
        load_config([*BASE, "--config", "/none.toml"], {})


def test_no_model_is_refused():
    with pytest.raises(ConfigError, match="--model"):
        load_config(BASE[2:], {})


def test_a_wrong_flag_is_named():
    with pytest.raises(ConfigError, match=r"--arena: 'x'"):
        load_config([*BASE, "--arena", "x"], {})


def test_a_maximum_below_the_size_is_refused():
    with pytest.raises(ConfigError, match="--arena-max is 1024 bytes"):
        load_config([*BASE, "--arena", "2KiB", "--arena-max", "1KiB"], {})


def test_a_runtime_directory_too_long_for_a_socket_is_refused_with_its_length():
    with pytest.raises(ConfigError, match=r"has 2\d\d bytes, a socket's path may have 100"):
        load_config(["--model", "m", "--runtime-dir", "/" + "x" * 200], {})


def test_user_ids_may_be_listed():
    assert load_config([*BASE, "--allowed-uids", "1000, 1001"], {}).allowed_uids == (1000, 1001)
