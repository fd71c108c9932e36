"""The compute process's settings: one frozen dataclass, read once and handed down.

Precedence: flags, then the environment (`HEADRACE_CHUNK` for `--chunk`, and so on), then the TOML
file named by `--config`, then the defaults. An unknown key of the file or a value out of range is
a ConfigError that names where it stood. `add_config_arguments` and `load_config` serve every
subcommand, so a flag means the same everywhere. Imports no torch.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError
from protocol.runtime_dir import check_runtime_dir, default_runtime_dir
from protocol.sizes import parse_size

ENVIRONMENT_PREFIX = "HEADRACE_"
DEFAULT_CONTEXT = 4096
PRECISIONS = ("highway", "vendor", "wide", "unrounded")


@dataclass(frozen=True, slots=True)
class ComputeConfig:
    """What compute was told; None where the choice is left to whoever knows more."""

    model: str = "demo"  # checkpoint directory, or `demo` for the packaged one
    precision: str = "highway"  # one of PRECISIONS
    device: str = "cpu"  # "cpu", "cuda" or "cuda:N"
    context: int | None = (
        None  # tokens, prompt included; None: DEFAULT_CONTEXT or the model's limit
    )
    chunk: int = 512  # prompt tokens a forward
    threads: int = 0  # CPU threads of one operator; 0: one for a small model, else all cores
    arena: int | None = None  # bytes for a daemon that we start; None: the daemon's own default
    read_threads: int | None = None  # for a daemon that we start
    runtime_dir: Path | None = None  # None: the default one where a daemon runs, else a private one
    state_dir: Path | None = None  # for a daemon that we start; None: its own default
    daemon_wait_s: float = 60.0  # how long a request waits for a lost daemon
    max_waiting: int = 32  # requests that wait in the service's queue
    vendor_decode_defect: bool = False  # reproduce the vendor's shared-key defect in decode
    max_tokens: int = 256  # new tokens of a request
    temperature: float = 1.0  # 0: greedy
    top_p: float = 0.95
    top_k: int = 0  # ids kept; 0: all
    min_p: float = 0.0
    seed: int | None = None  # None: a fresh one each run

    def find_runtime_dir(self, environment: Mapping[str, str]) -> Path:
        """Return the runtime directory given, else the default one.

        Raises ConfigError when there is none or a socket's path in it would be too long.
        """
        return check_runtime_dir(self.runtime_dir or default_runtime_dir(environment))


@dataclass(frozen=True, slots=True)
class _Option:
    convert: Callable[[object, str], Any]
    metavar: str | None
    help: str
    choices: tuple[str, ...] = ()


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}: {value!r} is not a name")
    return value


def _precision(value: object, where: str) -> str:
    if value not in PRECISIONS:
        raise ConfigError(f"{where}: {value!r} is none of {', '.join(PRECISIONS)}")
    return str(value)


def _directory(value: object, where: str) -> Path:
    return Path(_text(value, where)).expanduser().absolute()


def _count(least: int, most: int) -> Callable[[object, str], int]:
    def convert(value: object, where: str) -> int:
        try:
            number = int(value) if isinstance(value, str) else value
        except ValueError:
            number = None
        if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
            raise ConfigError(f"{where}: {value!r} is not a whole number from {least} to {most}")
        return number

    return convert


def _number(least: float, most: float) -> Callable[[object, str], float]:
    def convert(value: object, where: str) -> float:
        try:
            number = float(value) if isinstance(value, str | int | float) else float("nan")
        except ValueError:
            number = float("nan")
        if isinstance(value, bool) or not least <= number <= most:
            raise ConfigError(f"{where}: {value!r} is not a number from {least:g} to {most:g}")
        return number

    return convert


def _switch(value: object, where: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value.lower() not in known:
        raise ConfigError(f"{where}: {value!r} is neither true nor false")
    return known[value.lower()]


_OPTIONS = {
    "model": _Option(_text, "DIR", "checkpoint directory, or demo for the packaged model"),
    "precision": _Option(_precision, None, "how activations are kept and rounded", PRECISIONS),
    "device": _Option(_text, "NAME", "cpu, cuda or cuda:N"),
    "context": _Option(
        _count(1, 2**24), "N", "most tokens, prompt included (default: 4096 or the model's limit)"
    ),
    "chunk": _Option(_count(1, 2**16), "N", "prompt tokens computed at once"),
    "threads": _Option(_count(0, 1024), "N", "CPU threads of one operator; 0 suits the model"),
    "arena": _Option(parse_size, "SIZE", 'cap on the experts\' shared memory, such as "96GiB"'),
    "read_threads": _Option(_count(1, 64), "N", "reader threads of a daemon that is started here"),
    "runtime_dir": _Option(_directory, "DIR", "where the daemon's sockets are"),
    "state_dir": _Option(_directory, "DIR", "what a daemon started here keeps for next time"),
    "daemon_wait_s": _Option(_number(0, 86400), "SECONDS", "how long to wait for a lost daemon"),
    "max_waiting": _Option(_count(0, 4096), "N", "requests that wait at most; more are refused"),
    "vendor_decode_defect": _Option(_switch, None, "reproduce the vendor's defect in decode"),
    "max_tokens": _Option(_count(0, 2**24), "N", "new tokens at most"),
    "temperature": _Option(_number(0, 100), "T", "0 takes the likeliest token each time"),
    "top_p": _Option(_number(1e-9, 1), "P", "keep the likeliest tokens up to this sum"),
    "top_k": _Option(_count(0, 2**31), "K", "keep the K likeliest tokens; 0 keeps all"),
    "min_p": _Option(_number(0, 1), "P", "drop tokens below this share of the likeliest"),
    "seed": _Option(_count(0, 2**64 - 1), "N", "same seed, same text"),
}
assert list(_OPTIONS) == [field.name for field in fields(ComputeConfig)]

MODEL_OPTIONS = (
    "model",
    "precision",
    "device",
    "context",
    "chunk",
    "threads",
    "vendor_decode_defect",
)
DAEMON_OPTIONS = ("arena", "read_threads", "runtime_dir", "state_dir", "daemon_wait_s")
SERVICE_OPTIONS = ("runtime_dir", "daemon_wait_s", "max_waiting")
SAMPLING_OPTIONS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")


def add_config_arguments(parser: argparse.ArgumentParser, names: tuple[str, ...]) -> None:
    """Add the flag of each named setting, and `--config`."""
    parser.add_argument("--config", metavar="FILE.toml", help="settings; flags win over it")
    defaults = {field.name: field.default for field in fields(ComputeConfig)}
    for name in names:
        option, flag = _OPTIONS[name], "--" + name.replace("_", "-")
        default = defaults[name]
        text = option.help
        if default is not None and default is not False:
            text += f" (default: {default})"
        if option.convert is _switch:
            parser.add_argument(flag, action="store_const", const=True, help=text)
        else:
            parser.add_argument(
                flag, metavar=option.metavar, choices=option.choices or None, help=text
            )


def load_config(args: argparse.Namespace, environment: Mapping[str, str]) -> ComputeConfig:
    """Return the settings from parsed flags, the environment and the file. Raises ConfigError."""
    values: dict[str, tuple[object, str]] = {}
    file = getattr(args, "config", None) or environment.get(ENVIRONMENT_PREFIX + "CONFIG")
    if file is not None:
        values |= _file_values(Path(file))
    for name in _OPTIONS:
        variable = ENVIRONMENT_PREFIX + name.upper()
        if environment.get(variable):
            values[name] = (environment[variable], variable)
        flag = getattr(args, name, None)
        if flag is not None:
            values[name] = (flag, "--" + name.replace("_", "-"))
    return ComputeConfig(**{name: _OPTIONS[name].convert(*value) for name, value in values.items()})


def _file_values(path: Path) -> dict[str, tuple[object, str]]:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as TOML: {error}") from error
    unknown = sorted(set(raw) - set(_OPTIONS))
    if unknown:
        known = ", ".join(_OPTIONS)
        raise ConfigError(f"{path}: unknown key {unknown[0]!r}; known are {known}")
    return {name: (value, f"{path}: {name}") for name, value in raw.items()}


def private_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` for a daemon that we start.

    Without our own `--config`, which is not its own, and without what a service manager told us.
    """
    ours = {ENVIRONMENT_PREFIX + "CONFIG", "NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"}
    ours |= {"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"}
    return {name: value for name, value in environment.items() if name not in ours}
