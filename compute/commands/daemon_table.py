"""The `[daemon]` table of a settings file as flags, for a daemon that is started as a child.

Its top is left out: what the processes share there is already part of the starter's settings.
"""

from __future__ import annotations

from pathlib import Path

from protocol.settings_file import read_settings

_OURS = ("model", "runtime_dir")  # the starter says these
_ONCE = ("metrics", "trace", "trace_size")  # an address and a file that one daemon alone can have


def daemon_flags(file: Path | None, *, private: bool = False) -> list[str]:
    """Return the flags that the table stands for; none without a file. Raises ConfigError.

    private   for a daemon that ends with its command, beside which others may run
    """
    if file is None:
        return []
    from compute.config import COMPUTE_KEYS
    from compute.frontend.config import FRONTEND_OPTIONS
    from expert_daemon.config import OPTIONS

    others = (*COMPUTE_KEYS, *FRONTEND_OPTIONS)
    at_top = f"{file}: "
    left_out = (*_OURS, *_ONCE) if private else _OURS
    flags: list[str] = []
    for name, (value, where) in read_settings(file, "daemon", OPTIONS, others).items():
        if name in left_out or where == at_top + name:
            continue
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            flags += [flag] if value else []
        else:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            flags += [flag, text]
    return flags
