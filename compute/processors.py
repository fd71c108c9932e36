"""How many processors this process may keep busy."""

from __future__ import annotations

import os
from pathlib import Path

_OWN = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def n_processors(own: Path = _OWN, root: Path = _ROOT) -> float:
    """Return those that it may run on, or fewer where a control group (v2) allows less time.

    own, root  the process's list of groups, and where their files are
    """
    quotas = [quota for group in _groups(own, root) if (quota := _quota(group)) is not None]
    return min([float(len(os.sched_getaffinity(0))), *quotas])


def _groups(own: Path, root: Path) -> list[Path]:
    """The process's group and all above it."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    paths = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    groups = [root / path for path in paths]
    return [
        group
        for first in groups
        for group in (first, *first.parents)
        if root in (group, *group.parents)
    ]


def _quota(group: Path) -> float | None:
    """Processors that a group's `cpu.max` allows; None where it says nothing."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
        return None
