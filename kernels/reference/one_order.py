"""Asks the CPU's library of matrix products for one order of summation, whatever the shape.

MKL reads the wish at its first product of a process. It is known to keep to it on Intel's
processors; on others its usual code is left as it is, and `fill_rows` finds out what that does.
"""

from __future__ import annotations

import os
from pathlib import Path

_VARIABLE, _ONE_ORDER = "MKL_CBWR", "AUTO,STRICT"
_PROCESSORS = Path("/proc/cpuinfo")


def ask_for_one_order() -> None:
    """Set MKL_CBWR for this process and its children, unless it is set. Source: MKL's manual."""
    if _VARIABLE not in os.environ and _is_intels():
        os.environ[_VARIABLE] = _ONE_ORDER


def _is_intels() -> bool:
    try:
        with _PROCESSORS.open(encoding="ascii", errors="replace") as file:
            return any("GenuineIntel" in line for line in file)
    except OSError:
        return False
