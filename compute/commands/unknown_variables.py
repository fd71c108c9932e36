"""Environment variables that look like settings of ours and are none: a word misspelled."""

from __future__ import annotations

from collections.abc import Iterable

from compute.options import ENVIRONMENT_PREFIX
from protocol.wording import nearest

_FILE = "CONFIG"  # names the file of settings


def unknown_variables(names: Iterable[str]) -> list[str]:
    """Return one line for each variable that starts as ours do and that no process reads."""
    known = _known()
    found = sorted(name for name in names if name.startswith(ENVIRONMENT_PREFIX))
    words = [name.removeprefix(ENVIRONMENT_PREFIX) for name in found]
    return [_line(word, known) for word in words if word not in known]


def _known() -> list[str]:
    from compute.config import COMPUTE_OPTIONS
    from compute.frontend.config import FRONTEND_OPTIONS
    from expert_daemon.config import OPTIONS

    of_compute = [name for name, option in COMPUTE_OPTIONS.items() if option.has_flag]
    of_frontend = [name for name, option in FRONTEND_OPTIONS.items() if option.has_flag]
    return sorted({name.upper() for name in (*of_compute, *of_frontend, *OPTIONS)} | {_FILE})


def _line(word: str, known: list[str]) -> str:
    near = nearest(word, known)
    meant = f"; is {ENVIRONMENT_PREFIX}{near} meant?" if near else "; docs/settings.md has them all"
    return f"{ENVIRONMENT_PREFIX}{word}: no setting has this name, it is ignored{meant}"
