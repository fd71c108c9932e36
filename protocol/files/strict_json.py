"""JSON from a file that nobody has checked: config, index and shard headers."""

from __future__ import annotations

import json
import os
from typing import Any, BinaryIO, NoReturn


class JsonError(ValueError):
    """The text is not JSON that we accept; the caller adds the file's name."""


def read_bounded(file: BinaryIO, limit: int) -> bytes:
    """Return a file's content, of a larger one `limit` bytes and one more; reserves no more."""
    n_bytes = os.fstat(file.fileno()).st_size
    return file.read(min(n_bytes, limit) + 1)


def parse_strict(data: bytes, *, look_for_duplicates: bool = True) -> Any:
    """Parse `data` as UTF-8 JSON without duplicate keys, NaN, Infinity or lone surrogates in keys.

    A caller that has a faster way to find duplicate keys looks for them itself.

    Raises JsonError, and nothing else, on whatever the bytes may hold.
    """
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object_without_duplicates if look_for_duplicates else None,
            parse_constant=_refuse_constant,
        )
    except JsonError:
        raise
    except RecursionError:
        raise JsonError("JSON is nested too deeply") from None
    except ValueError as error:
        raise JsonError(f"not JSON in UTF-8: {error}") from None


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise JsonError(f"key {key!r} stands twice in one JSON object")
            seen.add(key)
    return table


def _refuse_constant(text: str) -> NoReturn:
    raise JsonError(f"{text} is not a JSON number")
