"""Whether what a long measurement ends in can be written: asked before it begins, not after."""

from __future__ import annotations

import tempfile
from pathlib import Path

from protocol.errors import ConfigError, why_unread


def check_file(path: Path, flag: str) -> None:
    """Raise ConfigError, which names the flag, where a file could not be written; leaves none."""
    try:
        if path.is_file() or path.is_dir():
            path.open("ab").close()
        elif not path.exists():  # a pipe or a device is taken as it is
            _create_in(path.parent)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be written: {why_unread(error)}") from None


def check_folder(path: Path, flag: str, otherwise: str) -> None:
    """Make a folder for what will be kept. Raises ConfigError where nothing can be written there.

    otherwise   what else the reader may do
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _create_in(path)
    except OSError as error:
        reason = why_unread(error)
        raise ConfigError(f"{flag} {path}: cannot be written: {reason}; {otherwise}") from None


def _create_in(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder):
        pass
