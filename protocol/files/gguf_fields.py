"""Typed reading of a GGUF's metadata under one architecture's prefix.

Every refusal names the file, the key, what was found and what was wanted; what is missing and has a
default is noted, so that it can be told.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np

from protocol.errors import ConfigError

from .gguf_values import STRING, GgufArray, Value

ELEMENTS_MAX = 1 << 22  # far above a vocabulary
_Number = TypeVar("_Number", int, float)


class GgufFields:
    """The metadata of one file: `fields.integer("block_count")` reads `deepseek41.block_count`."""

    def __init__(self, metadata: Mapping[str, Value], path: Path, architecture: str) -> None:
        self.metadata = metadata
        self.path = path
        self.architecture = architecture
        self.defaulted: list[str] = []  # keys that were missing and took their default

    def refusal(self, key: str, wanted: str) -> ConfigError:
        """Return the error for a key whose value is not `wanted`."""
        found = self.metadata.get(key)
        if found is None:
            state = "is missing"
        elif isinstance(found, GgufArray):
            state = f"is an array of {found.count} {found.element_name}"
        else:
            state = f"is {ascii(found)[:120]}"
        return ConfigError(f"{self.path}: {key} {state}, wanted {wanted}")

    def find(self, *names: str) -> str | None:
        """Return the first of the keys that is there; names with a leading dot have no prefix."""
        keys = (self.key(name) for name in names)
        return next((key for key in keys if key in self.metadata), None)

    def key(self, name: str) -> str:
        """Return a name's full key: `.tokenizer.ggml.model` stands for itself without the dot."""
        return name[1:] if name.startswith(".") else f"{self.architecture}.{name}"

    def integer(self, *names: str, default: int | None = None) -> int:
        """Return an integer, or the one that a per-layer list repeats."""
        key = self.find(*names)
        if key is None:
            return self._default(names[0], default, "an integer")
        value = self._same(key)
        if type(value) is not int:
            raise self.refusal(key, "an integer")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """Return a number; a float32 becomes the shortest decimal that is that float32."""
        key = self.find(*names)
        if key is None:
            return self._default(names[0], default, "a number")
        value = self._same(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refusal(key, "a number")
        short = np.float32(value)
        return float(str(short)) if float(short) == value else float(value)

    def text(self, name: str, default: str) -> str:
        """Return a string, or the default without a note."""
        value = self.metadata.get(self.key(name), default)
        if not isinstance(value, str):
            raise self.refusal(self.key(name), "a string")
        return value

    def integers(self, name: str) -> tuple[int, ...] | None:
        """Return a list of integers of any width, also where it is written as strings."""
        key = self.key(name)
        array = self.array(key)
        if array is None:
            self.defaulted.append(key)
            return None
        if array.element_type != STRING:
            return array.integers()
        try:
            return tuple(int(text) for text in array.strings())
        except ValueError:
            raise self.refusal(key, "a list of integers") from None

    def array(self, key: str) -> GgufArray | None:
        """Return an array of a sensible length by its full key, None where it is missing."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, GgufArray) or value.count > ELEMENTS_MAX:
            raise self.refusal(key, f"an array of at most {ELEMENTS_MAX} elements")
        return value

    def _default(self, name: str, default: _Number | None, wanted: str) -> _Number:
        if default is None:
            raise self.refusal(self.key(name), wanted)
        self.defaulted.append(self.key(name))
        return default

    def _same(self, key: str) -> Value:
        array = self.metadata[key]
        if not isinstance(array, GgufArray):
            return array
        if array.count > ELEMENTS_MAX or array.element_type == STRING:
            raise self.refusal(key, "a number")
        values: list[int | float] = array.numbers().tolist()
        if not values or any(value != values[0] for value in values):
            raise self.refusal(key, "one value for all layers")
        return values[0]
