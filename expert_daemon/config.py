"""The expert daemon's settings: one frozen dataclass, read once by `__main__` and handed down.

Precedence: flags, then the environment (`HEADRACE_ARENA` for `--arena`, and so on), then the TOML
file named by `--config`, then the defaults. An unknown TOML key or a value out of range is a
ConfigError that names where it stood.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError
from protocol.flag_parser import FlagParser
from protocol.runtime_dir import (
    DESCRIPTOR_NAME,
    LOCK_NAME,
    SOCKET_NAME,
    check_runtime_dir,
    default_runtime_dir,
)
from protocol.setting_names import ENVIRONMENT_PREFIX
from protocol.settings_file import read_settings
from protocol.sizes import parse_size

from .metrics_address import parse_address

PROG = "python -m expert_daemon"
POLICIES = ("lfu-da", "lru", "lru-random")
READ_MODES = ("direct", "buffered")
MAX_READ_THREADS = 64
MAX_BATCH = 4096
_SIZES = ("arena", "arena_max", "trace_size")


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """What the daemon was told; sizes in bytes, directories not yet created."""

    model: str  # model directory, .gguf file, or `demo` for the packaged one
    runtime_dir: Path  # sockets and the lock
    state_dir: Path  # what outlives a machine's restart
    arena_bytes: int = 0  # hard cap on the arena as populated; 0: all experts, at most half of RAM
    arena_max_bytes: int = 0  # largest size that the arena may ever have; 0: arena_bytes
    read_threads: int = 0  # demand readers; 0: as tuned, else 8
    read_mode: str = ""  # "direct" (O_DIRECT) or "buffered"; "": as tuned, else direct
    policy: str = "lfu-da"  # which slot is evicted first
    prefetch: bool = False  # read what the engine foresees
    batch: int = 1  # tokens decoded at once, for the smallest legal arena
    metrics: str = ""  # where Prometheus metrics are served, see metrics_address; "": nowhere
    no_save: bool = False  # write nothing into the state directory
    trace: Path | None = None  # file that routing traces are recorded into; None: none are
    trace_size_bytes: int = 64 << 20  # of that file; once full it becomes an older part
    allowed_uids: tuple[int, ...] = ()  # further user ids that may attach, beside our own

    @property
    def lock_path(self) -> Path:
        """The exclusive lock's file."""
        return self.runtime_dir / LOCK_NAME

    @property
    def socket_path(self) -> Path:
        """The ZeroMQ ipc socket's path."""
        return self.runtime_dir / SOCKET_NAME

    @property
    def descriptor_path(self) -> Path:
        """The descriptor socket's path."""
        return self.runtime_dir / DESCRIPTOR_NAME


def load_config(
    arguments: Sequence[str], environment: Mapping[str, str], prog: str = PROG
) -> DaemonConfig:
    """Return the settings of one daemon from its flags, its environment and its TOML file.

    prog   what its usage says that it is called

    Raises ConfigError; `--help` and a malformed flag end the process as argparse does.
    """
    flags = {k: v for k, v in vars(_parser(prog).parse_args(arguments)).items() if v is not None}
    file = flags.pop("config", None) or environment.get(ENVIRONMENT_PREFIX + "CONFIG")
    values: dict[str, tuple[Any, str]] = {}
    if file is not None:
        values |= _toml_values(Path(file))
    for name in OPTIONS:
        variable = ENVIRONMENT_PREFIX + name.upper()
        if environment.get(variable):
            values[name] = (environment[variable], variable)
        if name in flags:
            values[name] = (flags[name], "--" + name.replace("_", "-"))
    return _checked(values, environment)


OPTIONS = {
    "model": "model directory, .gguf file, or `demo` for the packaged demo model",
    "arena": 'cap on shared memory, such as "96GiB" (default: all experts, at most half of RAM)',
    "arena_max": "largest size that the arena may ever be resized to (default: --arena)",
    "runtime_dir": "sockets and lock (default: /run/headrace or $XDG_RUNTIME_DIR/headrace)",
    "state_dir": "what outlives a restart of the machine (default: $XDG_STATE_HOME/headrace)",
    "read_threads": "threads that read experts (default: as tuned, else 8)",
    "read_mode": "direct or buffered (default: as tuned, else direct)",
    "policy": "which expert is evicted first: lfu-da, lru or lru-random (default: lfu-da)",
    "prefetch": "read what the engine foresees, while nothing is waited for",
    "batch": "tokens decoded at once, for the smallest legal arena (default: 1)",
    "metrics": "serve Prometheus metrics at 127.0.0.1:PORT or unix:/PATH (default: nowhere)",
    "no_save": "write nothing into the state directory",
    "trace": "record each step's picks into this file, for `headrace simulate`",
    "trace_size": "size, 1GiB at most, at which the trace becomes FILE.1, of which 7 are kept"
    " (default: 64MiB)",
    "allowed_uids": "further user ids that may attach, separated by commas",
}


_SWITCHES = ("no_save", "prefetch")


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = FlagParser(
        prog=prog,
        description="Keep experts of a mixture-of-experts model in shared memory, read on demand.",
    )
    parser.add_argument("--config", metavar="FILE.toml", help="settings; flags win over it")
    for name, text in OPTIONS.items():
        if name in _SWITCHES:
            parser.add_argument(
                "--" + name.replace("_", "-"), action="store_true", default=None, help=text
            )
            continue
        metavar = {
            "arena": "SIZE",
            "arena_max": "SIZE",
            "read_threads": "N",
            "batch": "N",
            "trace": "FILE",
            "trace_size": "SIZE",
            "metrics": "ADDRESS",
        }
        parser.add_argument(
            "--" + name.replace("_", "-"),
            metavar=metavar.get(name, "DIR" if name.endswith("_dir") else name.upper()),
            help=text,
        )
    return parser


def _toml_values(path: Path) -> dict[str, tuple[Any, str]]:
    values = read_settings(path, "daemon", OPTIONS)
    for name, (value, where) in values.items():
        _CONVERTERS[name](value, where)  # also where a flag will win over it
    return values


def _checked(values: Mapping[str, tuple[Any, str]], environment: Mapping[str, str]) -> DaemonConfig:
    built: dict[str, Any] = {}
    for name, (value, where) in values.items():
        field = name + "_bytes" if name in _SIZES else name
        built[field] = _CONVERTERS[name](value, where)
    if "model" not in built:
        raise ConfigError("no model: --model PATH, HEADRACE_MODEL or `model` in the TOML file")
    if "runtime_dir" not in built:
        built["runtime_dir"] = default_runtime_dir(environment)
    if "state_dir" not in built:
        built["state_dir"] = default_state_dir(environment)
    config = DaemonConfig(**built)
    if config.arena_max_bytes and config.arena_max_bytes < config.arena_bytes:
        raise ConfigError(
            f"--arena-max is {config.arena_max_bytes} bytes, --arena is {config.arena_bytes}; "
            "the arena cannot be larger than its maximum"
        )
    check_runtime_dir(config.runtime_dir)
    return config


def default_state_dir(environment: Mapping[str, str]) -> Path:
    """Return $STATE_DIRECTORY, else $XDG_STATE_HOME/headrace, else ~/.local/state/headrace."""
    if environment.get("STATE_DIRECTORY"):
        return Path(environment["STATE_DIRECTORY"].split(":")[0])
    if environment.get("XDG_STATE_HOME"):
        return Path(environment["XDG_STATE_HOME"]) / "headrace"
    return Path.home() / ".local" / "state" / "headrace"


def _directory(value: object, where: str) -> Path:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ConfigError(f"{where}: {value!r} is not a directory's name")
    return Path(value).expanduser().absolute()


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}: {value!r} is not a name")
    return value


def _choice(value: object, where: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ConfigError(f"{where}: {value!r} is none of {', '.join(choices)}")
    return str(value)


def _count(value: object, where: str, largest: int) -> int:
    text = str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= largest:
        raise ConfigError(f"{where}: {value!r} is not a number from 1 to {largest}")
    return int(text)


def _metrics(value: object, where: str) -> str:
    address = _text(value, where)
    parse_address(address, where)
    return address


def _switch(value: object, where: str) -> bool:
    if isinstance(value, bool):
        return value
    if value not in ("0", "1"):
        raise ConfigError(f"{where}: {value!r} is neither 0 nor 1")
    return value == "1"


def _uids(value: object, where: str) -> tuple[int, ...]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list) or not all(re.fullmatch(r" *\d{1,10} *", str(i)) for i in items):
        raise ConfigError(f"{where}: {value!r} is not a list of user ids")
    return tuple(int(item) for item in items)


_CONVERTERS = {
    "model": _text,
    "arena": parse_size,
    "arena_max": parse_size,
    "runtime_dir": _directory,
    "state_dir": _directory,
    "read_threads": lambda value, where: _count(value, where, MAX_READ_THREADS),
    "read_mode": lambda value, where: _choice(value, where, READ_MODES),
    "policy": lambda value, where: _choice(value, where, POLICIES),
    "batch": lambda value, where: _count(value, where, MAX_BATCH),
    "metrics": _metrics,
    "no_save": _switch,
    "prefetch": _switch,
    "trace": _directory,
    "trace_size": parse_size,
    "allowed_uids": _uids,
}
assert {f.name.removesuffix("_bytes") for f in fields(DaemonConfig)} == set(OPTIONS)
