"""Where the processes meet: the runtime directory, its files' names and what their paths may be.

Invariant: a shared temporary directory is never chosen; a path that a socket cannot have is refused
before anything is bound to it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from .errors import ConfigError

MAX_SOCKET_PATH_BYTES = 100
LOCK_NAME = "expertd.lock"
SOCKET_NAME = "expertd.sock"
DESCRIPTOR_NAME = "arena.sock"


def default_runtime_dir(environment: Mapping[str, str]) -> Path:
    """Return /run/headrace where it is ours and writable, else $XDG_RUNTIME_DIR/headrace.

    Raises ConfigError when neither exists.
    """
    system, why_not = Path("/run/headrace"), "is not ours"
    try:
        if system.stat().st_uid == os.getuid() and os.access(system, os.W_OK | os.X_OK):
            return system
    except FileNotFoundError:
        why_not = "does not exist"
    except OSError:
        pass
    if environment.get("XDG_RUNTIME_DIR"):
        return Path(environment["XDG_RUNTIME_DIR"]) / "headrace"
    raise ConfigError(
        f"no runtime directory: /run/headrace {why_not} and XDG_RUNTIME_DIR is not set; "
        "mkdir -m 0700 ~/.headrace, then give --runtime-dir ~/.headrace to every command"
    )


def check_runtime_dir(directory: Path) -> Path:
    """Return `directory` when every socket in it can have its path.

    Raises ConfigError naming the path, its length and the limit.
    """
    for name in (LOCK_NAME, SOCKET_NAME, DESCRIPTOR_NAME):
        path = directory / name
        n_bytes = len(os.fsencode(path))
        if n_bytes > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"runtime directory: {path} has {n_bytes} bytes, a socket's path may have "
                f"{MAX_SOCKET_PATH_BYTES}; choose a shorter --runtime-dir"
            )
    return directory
