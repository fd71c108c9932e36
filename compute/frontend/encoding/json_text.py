"""JSON text of values that a model wrote."""

from __future__ import annotations

import json
from typing import NoReturn


def quoted(text: str) -> str:
    """Return `text` as a JSON string, quotes included."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Return the inside of that string; of joined texts it is the joined insides."""
    return quoted(text)[1:-1]


def is_json(text: str) -> bool:
    """Return whether `text` is a JSON value; NaN and Infinity are none."""
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def value_text(text: str) -> str:
    """Return `text` where it is JSON, else the JSON string that holds it."""
    return text if is_json(text) else quoted(text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
