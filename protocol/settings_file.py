"""One TOML file of settings for all processes: what they share at its top, a table for each.

A key at the top counts for every process that knows it, one in `[daemon]`, `[compute]` or
`[frontend]` for that process alone, where it wins. Other processes' tables are left unread.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from .errors import ConfigError, why_unread

PROCESSES = ("daemon", "compute", "frontend")


def read_settings(
    path: Path, process: str, known: Collection[str], also_known: Collection[str] = ()
) -> dict[str, tuple[Any, str]]:
    """Return {key: (value, where it stands)} of one process. Raises ConfigError.

    process     one of PROCESSES
    known       its keys
    also_known  keys that may stand at the top for other processes
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {why_unread(error)}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as TOML: {error}") from error
    tables = {name: raw.pop(name) for name in PROCESSES if name in raw}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} is {table!r}, wanted a table: [{name}]")
    own = tables.get(process, {})
    _refuse_unknown(str(path), raw, dict.fromkeys((*known, *also_known)))
    _refuse_unknown(f"{path}: [{process}]", own, known)
    found = {name: (value, f"{path}: {name}") for name, value in raw.items() if name in known}
    return found | {name: (value, f"{path}: {process}.{name}") for name, value in own.items()}


def _refuse_unknown(where: str, keys: Collection[str], known: Collection[str]) -> None:
    unknown = sorted(set(keys) - set(known))
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(known)}")
