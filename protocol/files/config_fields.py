"""Typed reading of one JSON object of a config file.

Every method names the field, what was found and what was wanted in a ConfigError.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, TypeGuard

from protocol.errors import ConfigError

_MISSING = object()


class ConfigFields:
    """One JSON object, read field by field: `fields.integer("hidden_size", 32, 2**17)`."""

    def __init__(self, raw: object, where: str, prefix: str = "") -> None:
        self.where = where
        self.prefix = prefix
        if not isinstance(raw, Mapping):
            name = prefix.rstrip(".") or "the file"
            raise ConfigError(f"{where}: {name} is {_shown(raw)}, wanted a JSON object")
        self.raw: Mapping[str, Any] = raw

    def refusal(self, name: str, wanted: str) -> ConfigError:
        """Return the error for a field whose value is not `wanted`."""
        found = self.raw.get(name, _MISSING)
        state = "is missing" if found is _MISSING else f"is {_shown(found)}"
        return ConfigError(f"{self.where}: {self.prefix}{name} {state}, wanted {wanted}")

    def inner(self, name: str) -> ConfigFields:
        """Return the object under `name`."""
        if name not in self.raw:
            raise self.refusal(name, "a JSON object")
        return ConfigFields(self.raw[name], self.where, f"{self.prefix}{name}.")

    def integer(self, name: str, low: int, high: int, *, multiple: int = 1) -> int:
        """Return an integer of low..high; a boolean or a float is none."""
        value = self.raw.get(name)
        if _is_int(value) and low <= value <= high and value % multiple == 0:
            return value
        of = f" that {multiple} divides" if multiple > 1 else ""
        raise self.refusal(name, f"an integer from {low} to {high}{of}")

    def number(self, name: str, low: float, high: float) -> float:
        """Return a finite number of low..high as a float; a boolean is none."""
        value = self.raw.get(name)
        if (isinstance(value, float) or _is_int(value)) and low <= value <= high:
            return float(value)
        raise self.refusal(name, f"a number from {low:g} to {high:g}")

    def integers(self, name: str, low: int, high: int) -> tuple[int, ...]:
        """Return a list of integers, each of low..high."""
        value = self.raw.get(name)
        if isinstance(value, list) and all(_is_int(item) and low <= item <= high for item in value):
            return tuple(value)
        raise self.refusal(name, f"a list of integers from {low} to {high}")

    def ascending(self, name: str, low: int, high: int) -> tuple[int, ...]:
        """Return a strictly ascending list of integers, each of low..high."""
        value = self.integers(name, low, high)
        if any(left >= right for left, right in pairwise(value)):
            raise self.refusal(name, "a strictly ascending list")
        return value

    def fixed(self, name: str, wanted: object, *, optional: bool = False) -> None:
        """Accept `wanted` alone (same type), or the field's absence where it is optional."""
        if optional and self.raw.get(name, None) is None:
            return
        value = self.raw.get(name, _MISSING)
        same_type = type(value) is type(wanted) or (isinstance(wanted, float) and _is_int(value))
        if not same_type or value != wanted:
            raise self.refusal(name, _shown(wanted))


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."
