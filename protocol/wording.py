"""What errors of every room say alike: the name that may be meant, and how a package comes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most like a mistyped one, "" where none is near."""
    return next(iter(difflib.get_close_matches(name, list(known), 1)), "")


def to_install(extra: str = "") -> str:
    """Return how to install headrace with an extra; it is on no package index."""
    what = f"'.[{extra}]'" if extra else "."
    return f"pip install {what} in the clone"
