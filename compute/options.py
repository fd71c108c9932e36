"""Settings as tables of options: flags, environment, TOML file and defaults, read in one way.

Precedence: flags, then the environment (`HEADRACE_CHUNK` for `--chunk`, and so on), then the TOML
file named by `--config`. An unknown key of the file or a value out of range is a ConfigError that
names where it stood.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError
from protocol.setting_names import ENVIRONMENT_PREFIX
from protocol.settings_file import read_settings

Convert = Callable[[object, str], Any]  # (value, where it stood) -> the setting


@dataclass(frozen=True, slots=True)
class Option:
    """How one setting is written."""

    convert: Convert
    metavar: str | None
    help: str
    choices: tuple[str, ...] = ()
    has_flag: bool = True  # False: only in the file


def text(value: object, where: str) -> str:
    """A string that is not empty."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}: {value!r} is not a name")
    return value


def path(value: object, where: str) -> Path:
    """A path, made absolute."""
    return Path(text(value, where)).expanduser().absolute()


def word(choices: Collection[str]) -> Convert:
    """One of a few words."""

    def convert(value: object, where: str) -> str:
        if value not in choices:
            raise ConfigError(f"{where}: {value!r} is none of {', '.join(choices)}")
        return str(value)

    return convert


def count(least: int, most: int) -> Convert:
    """A whole number in a range."""

    def convert(value: object, where: str) -> int:
        try:
            number = int(value) if isinstance(value, str) else value
        except ValueError:
            number = None
        if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
            raise ConfigError(f"{where}: {value!r} is not a whole number from {least} to {most}")
        return number

    return convert


def number(least: float, most: float) -> Convert:
    """A number in a range."""

    def convert(value: object, where: str) -> float:
        try:
            number = float(value) if isinstance(value, str | int | float) else float("nan")
        except ValueError:
            number = float("nan")
        if isinstance(value, bool) or not least <= number <= most:
            raise ConfigError(f"{where}: {value!r} is not a number from {least:g} to {most:g}")
        return number

    return convert


def switch(value: object, where: str) -> bool:
    """True or false; a flag of it has no value."""
    known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value.lower() not in known:
        raise ConfigError(f"{where}: {value!r} is neither true nor false")
    return known[value.lower()]


def add_flags(
    parser: argparse.ArgumentParser,
    options: Mapping[str, Option],
    defaults: Mapping[str, Any],
) -> None:
    """Add the flag of each option."""
    for name, option in options.items():
        if not option.has_flag:
            continue
        flag, default, help_text = "--" + name.replace("_", "-"), defaults[name], option.help
        if default is not None and default is not False:
            help_text += f" (default: {default})"
        if option.convert is switch:
            parser.add_argument(flag, action="store_const", const=True, help=help_text)
        else:
            parser.add_argument(
                flag, metavar=option.metavar, choices=option.choices or None, help=help_text
            )


def settings_file(args: argparse.Namespace, environment: Mapping[str, str]) -> Path | None:
    """Return the file of settings that was named; None for none."""
    file = getattr(args, "config", None) or environment.get(ENVIRONMENT_PREFIX + "CONFIG")
    return Path(file) if file else None


def read_options(
    options: Mapping[str, Option],
    args: argparse.Namespace,
    environment: Mapping[str, str],
    *,
    process: str,
    also_known: Collection[str] = (),
) -> dict[str, Any]:
    """Return the settings that were given anywhere, by name. Raises ConfigError.

    process      whose table of the file counts
    also_known   keys at the top of the file that belong to another process
    """
    values: dict[str, tuple[object, str]] = {}
    file = settings_file(args, environment)
    if file is not None:
        values |= read_settings(file, process, options, also_known)
    for name, option in options.items():
        variable = ENVIRONMENT_PREFIX + name.upper()
        if environment.get(variable) and option.has_flag:
            values[name] = (environment[variable], variable)
        flag = getattr(args, name, None)
        if flag is not None:
            values[name] = (flag, "--" + name.replace("_", "-"))
    return {name: options[name].convert(*value) for name, value in values.items()}
