"""One finding: what was looked at, what was found, what would be wanted, and what to do.

`Host` is where the checks look, so that a test can show them another machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

STATUSES = ("ok", "note", "warning", "error")  # by severity
EXIT_STATUS = {"ok": 0, "note": 0, "warning": 1, "error": 2}


@dataclass(frozen=True, slots=True)
class Check:
    """A finding; `fix` says what to do and is empty where nothing is to be done."""

    name: str
    status: str  # one of STATUSES
    found: str
    wanted: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Host:
    """A machine and its user, as the checks see them."""

    environment: Mapping[str, str]
    root: Path = Path("/")  # where /proc and /sys are
    distributions: Callable[[str], str | None] = field(default=lambda _name: None)
    run: Callable[[Sequence[str]], str | None] = field(default=lambda _command: None)

    def read(self, path: str) -> str | None:
        """Return a small file's text below the root, None where it cannot be read."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace").strip()
        except OSError:
            return None


def worst_of(checks: Sequence[Check]) -> str:
    """Return the worst status; "ok" of none."""
    return max((check.status for check in checks), key=STATUSES.index, default="ok")
