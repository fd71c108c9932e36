from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from compute.config import (
    DAEMON_OPTIONS,
    MODEL_OPTIONS,
    SAMPLING_OPTIONS,
    ComputeConfig,
    add_config_arguments,
    load_config,
    private_environment,
)
from protocol.errors import ConfigError


def _load(
    *flags: str, environment: dict[str, str] | None = None, file: Path | None = None
) -> ComputeConfig:
    parser = argparse.ArgumentParser()
    add_config_arguments(parser, MODEL_OPTIONS + DAEMON_OPTIONS + SAMPLING_OPTIONS)
    arguments = list(flags) + (["--config", str(file)] if file else [])
    return load_config(parser.parse_args(arguments), environment or {})


def test_defaults_hold_when_nothing_is_said() -> None:
    assert _load() == ComputeConfig()


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "compute.toml"
    file.write_text('context = 100\nchunk = 10\narena = "1GiB"\nthreads = 1\n')
    environment = {"HEADRACE_CONTEXT": "200", "HEADRACE_CHUNK": "20"}
    config = _load("--context", "300", environment=environment, file=file)
    assert (config.context, config.chunk, config.threads) == (300, 20, 1)
    assert config.arena == 1 << 30
    assert _load(environment=environment | {"HEADRACE_CONFIG": str(file)}).arena == 1 << 30


def test_an_unknown_key_of_the_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "compute.toml"
    file.write_text("contxt = 100\n")
    with pytest.raises(ConfigError, match=r"compute\.toml: unknown key 'contxt'; known are model"):
        _load(file=file)


def test_a_missing_or_damaged_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read: no such file$"):
        _load(file=tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--context", "0"], "--context: '0' is not a whole number from 1 to"),
        (["--context", "1e3"], "--context: '1e3' is not a whole number"),
        (["--temperature", "-1"], "--temperature: '-1' is not a number from 0 to 100"),
        (["--temperature", "nan"], "--temperature: 'nan' is not a number"),
        (["--top-p", "1.5"], "--top-p"),
        (["--arena", "lots"], "--arena: 'lots' is not a size"),
        (["--seed", "-1"], "--seed"),
        (["--runtime-dir", ""], "--runtime-dir"),
    ],
)
def test_a_value_out_of_range_names_its_flag(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _load(*flags)


def test_a_value_of_the_wrong_type_names_file_and_key(tmp_path: Path) -> None:
    file = tmp_path / "compute.toml"
    file.write_text("chunk = true\n")
    with pytest.raises(ConfigError, match=r"compute\.toml: chunk: True"):
        _load(file=file)


def test_switches_read_the_same_everywhere() -> None:
    assert _load("--vendor-decode-defect").vendor_decode_defect
    assert _load(environment={"HEADRACE_VENDOR_DECODE_DEFECT": "true"}).vendor_decode_defect
    assert not _load(environment={"HEADRACE_VENDOR_DECODE_DEFECT": "0"}).vendor_decode_defect
    with pytest.raises(ConfigError, match="neither true nor false"):
        _load(environment={"HEADRACE_VENDOR_DECODE_DEFECT": "maybe"})


def test_a_runtime_directory_too_long_for_a_socket_is_refused() -> None:
    with pytest.raises(ConfigError, match="may have 100"):
        _load("--runtime-dir", "/" + "x" * 100).find_runtime_dir({})


def test_what_was_meant_for_us_is_not_handed_to_the_daemon() -> None:
    environment = {"HEADRACE_CONFIG": "compute.toml", "NOTIFY_SOCKET": "/run/systemd/notify"}
    environment |= {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "arena"}
    environment |= {"HEADRACE_READ_THREADS": "2", "HOME": "/"}
    assert private_environment(environment) == {"HEADRACE_READ_THREADS": "2", "HOME": "/"}
