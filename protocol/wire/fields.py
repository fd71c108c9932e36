"""Checks of single fields: each returns the value as the message holds it, or raises Unfit.

A check takes (value, bounds). Without bounds (before Welcome) only types and the wire's own limits
are checked. Pure.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .limits import MAX_TEXT

U16 = (1 << 16) - 1
U31 = (1 << 31) - 1
U32 = (1 << 32) - 1
U63 = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Bounds:
    """The model's and the arena's counts, for range checks."""

    n_layers: int = U16 + 1
    n_experts: int = U16 + 1
    n_slots: int = U31
    n_tables: int = 256  # Engram tables
    ring_rows: int = U31  # rows of the Engram row ring


ANY = Bounds()

Check = Callable[[Any, Bounds], Any]


class Unfit(ValueError):
    """A field is not what it must be. `kind` is type, range, order or size."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 1
_SHORT.maxlist = 4
_SHORT.maxdict = 2
_SHORT.maxstring = 40
_SHORT.maxother = 40


def shown(value: object) -> str:
    """The value for an error text, cut short in length and depth."""
    return _SHORT.repr(value)


def integer(low: int = 0, high: int = U63) -> Check:
    """An int in low .. high; a bool or a float is none."""

    def check(value: Any, _bounds: Bounds) -> int:
        if type(value) is not int:
            raise Unfit("type", f"found {shown(value)}, wanted an integer")
        if not low <= value <= high:
            raise Unfit("range", f"found {value}, wanted {low} to {high}")
        return value

    return check


count = integer()


def layer(value: Any, bounds: Bounds) -> int:
    """A layer of the model."""
    return below(value, bounds.n_layers, "layer")


def expert(value: Any, bounds: Bounds) -> int:
    """A routed expert of a layer."""
    return below(value, bounds.n_experts, "expert")


def table_index(value: Any, bounds: Bounds) -> int:
    """An Engram table."""
    return below(value, bounds.n_tables, "table")


def below(value: Any, end: int, name: str) -> int:
    """An int in 0 .. end - 1."""
    if type(value) is not int:
        raise Unfit("type", f"found {name} {shown(value)}, wanted an integer")
    if not 0 <= value < end:
        raise Unfit("range", f"found {name} {value}, wanted 0 to {end - 1}")
    return value


def number(value: Any, _bounds: Bounds) -> float:
    """A finite float, not negative."""
    if type(value) not in (int, float) or not 0.0 <= value < math.inf:
        raise Unfit("type", f"found {shown(value)}, wanted a number from 0")
    return float(value)


def flag(value: Any, _bounds: Bounds) -> bool:
    """A bool."""
    if type(value) is not bool:
        raise Unfit("type", f"found {shown(value)}, wanted true or false")
    return value


def text(value: Any, _bounds: Bounds) -> str:
    """A string of at most MAX_TEXT characters."""
    if type(value) is not str:
        raise Unfit("type", f"found {shown(value)}, wanted a text")
    if len(value) > MAX_TEXT:
        raise Unfit("size", f"found {len(value)} characters, wanted at most {MAX_TEXT}")
    return value


def word(choices: tuple[str, ...]) -> Check:
    """One of a few words."""

    def check(value: Any, _bounds: Bounds) -> str:
        if type(value) is not str or value not in choices:
            raise Unfit("range", f"found {shown(value)}, wanted one of {', '.join(choices)}")
        return value

    return check


def binary(*lengths: int) -> Check:
    """Bytes of one of these lengths."""

    def check(value: Any, _bounds: Bounds) -> bytes:
        raw = bytes_(value)
        if len(raw) not in lengths:
            wanted = " or ".join(str(length) for length in lengths)
            raise Unfit("size", f"found {len(raw)} bytes, wanted {wanted}")
        return raw

    return check


def blob(value: Any, _bounds: Bounds) -> bytes:
    """Bytes of any length, within the frame's own."""
    return bytes_(value)


def bytes_(value: Any) -> bytes:
    """Bytes of any length."""
    if type(value) is not bytes:
        raise Unfit("type", f"found {shown(value)}, wanted bytes")
    return value


def tuple_(value: Any, length: int) -> tuple[Any, ...]:
    """A list of this length."""
    if (type(value) is not list and type(value) is not tuple) or len(value) != length:
        raise Unfit("type", f"found {shown(value)}, wanted {length} values")
    return tuple(value)


def version(value: Any, _bounds: Bounds) -> tuple[int, int]:
    """(major, minor)."""
    major, minor = tuple_(value, 2)
    for part in (major, minor):
        below(part, U16 + 1, "version")
    return major, minor
