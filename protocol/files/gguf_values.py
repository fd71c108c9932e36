"""The metadata values of a GGUF header: numbers and strings at once, arrays where they lie.

An array stays in the file: its place and size are kept, and its values are read when asked for. A
vocabulary of 129,280 strings thus costs nothing until somebody wants it. Integers keep all 64 bits.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ShardError

from .gguf_cursor import Cursor

STRING_BYTES_MAX = 1 << 24
BOOL, STRING, ARRAY = 7, 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    BOOL: struct.Struct("<B"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
FLOATS = (6, 12)
TYPE_NAMES = {
    0: "u8", 1: "i8", 2: "u16", 3: "i16", 4: "u32", 5: "i32", 6: "f32", BOOL: "bool",
    STRING: "string", ARRAY: "array", 10: "u64", 11: "i64", 12: "f64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array of a GGUF header, still in the file."""

    path: Path = field(repr=False)
    key: str
    element_type: int
    count: int
    offset: int  # of the first element, from the start of the file
    n_bytes: int

    @property
    def element_name(self) -> str:
        """The type of the elements in words: u32, string."""
        return TYPE_NAMES[self.element_type]

    def numbers(self) -> NDArray[np.generic]:
        """Return the numbers (bool as u8) in the file's own type; ShardError on strings."""
        if self.element_type == STRING:
            raise self._refusal("holds strings, wanted numbers")
        code = _SCALARS[self.element_type].format
        return np.frombuffer(self._data(), np.dtype(code))

    def integers(self) -> tuple[int, ...]:
        """Return the integers, exact; ShardError on strings and floats."""
        if self.element_type in FLOATS or self.element_type == BOOL:
            raise self._refusal(f"holds {self.element_name}, wanted integers")
        return tuple(int(number) for number in self.numbers().tolist())

    def strings(self) -> Iterator[str]:
        """Yield the strings one by one; ShardError on numbers and on invalid UTF-8."""
        if self.element_type != STRING:
            raise self._refusal(f"holds {self.element_name}, wanted strings")
        data = self._data()
        at = 0
        for number in range(self.count):
            end = at + 8 + int.from_bytes(data[at : at + 8], "little")
            if end > len(data):
                raise self._refusal("has changed since the header was read")
            try:
                yield data[at + 8 : end].decode()
            except UnicodeDecodeError:
                raise self._refusal(f"holds invalid UTF-8 in string {number}") from None
            at = end

    def _data(self) -> bytes:
        try:
            with self.path.open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), self.n_bytes, self.offset)
                while len(data) < self.n_bytes:
                    part = os.pread(
                        file.fileno(), self.n_bytes - len(data), self.offset + len(data)
                    )
                    if not part:
                        raise self._refusal("has changed since the header was read")
                    data += part
        except OSError as error:
            raise self._refusal(f"cannot be read: {error.strerror or error}") from None
        return data

    def _refusal(self, what: str) -> ShardError:
        return ShardError(f"{self.path}: {self.key} {what}")


Value = int | float | bool | str | GgufArray


def read_value(cursor: Cursor, key: str) -> Value:
    """Return the value at the cursor, its type in front of it, and move past it."""
    type_id = cursor.u32(key)
    if type_id == ARRAY:
        return _read_array(cursor, key)
    if type_id == STRING:
        # A broken name or template is no reason to refuse a model: it is shown, not used.
        return cursor.counted(key, STRING_BYTES_MAX).decode(errors="replace")
    scalar = _SCALARS.get(type_id)
    if scalar is None:
        raise cursor.refusal(f"{key} has the unknown value type {type_id}")
    value: int | float = scalar.unpack(cursor.take(scalar.size, key))[0]
    if type_id == BOOL:
        if value > 1:
            raise cursor.refusal(f"{key} is a bool of {value}, wanted 0 or 1")
        return bool(value)
    return value


def _read_array(cursor: Cursor, key: str) -> GgufArray:
    element_type = cursor.u32(key)
    count = cursor.u64(key)
    start = cursor.offset
    if element_type == STRING:
        if count > cursor.left // 8:
            raise cursor.refusal(
                f"{key} says {count} strings, {max(cursor.left, 0)} bytes are left"
            )
        cursor.skip_strings(count, key)
    else:
        scalar = _SCALARS.get(element_type)
        if scalar is None:
            found = TYPE_NAMES.get(element_type, str(element_type))
            raise cursor.refusal(f"{key} is an array of {found}, wanted numbers or strings")
        cursor.skip(count * scalar.size, key)
    return GgufArray(cursor.path, key, element_type, count, start, cursor.offset - start)
