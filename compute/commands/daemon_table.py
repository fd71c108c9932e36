"""The `[daemon]` table of a settings file as flags, for a daemon that is started as a child.

Its top is left out: what the processes share there is already part of the starter's settings.
"""

from __future__ import annotations

from pathlib import Path

from protocol.settings_file import read_settings

_OURS = ("model", "runtime_dir")  # the starter says these


def daemon_flags(file: Path | None) -> list[str]:
    """Return the flags that the table stands for; none without a file. Raises ConfigError."""
    if file is None:
        return []
    from compute.config import COMPUTE_KEYS
    from compute.frontend.config import FRONTEND_OPTIONS
    from expert_daemon.config import OPTIONS

    others = (*COMPUTE_KEYS, *FRONTEND_OPTIONS)
    at_top = f"{file}: "
    flags: list[str] = []
    for name, (value, where) in read_settings(file, "daemon", OPTIONS, others).items():
        if name in _OURS or where == at_top + name:
            continue
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            flags += [flag] if value else []
        else:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            flags += [flag, text]
    return flags
