"""Single fields of a request body, checked; an error names the field, what was found and wanted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compute.frontend.http.errors import ApiError

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024


class Fields:
    """A request body; null counts as absent."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body

    def has(self, name: str) -> bool:
        """Whether the field is there."""
        return self.body.get(name) is not None

    def number(self, name: str, least: float, most: float, default: float) -> float:
        """A number in a range."""
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise wrong(name, value, "a number")
        if not least <= value <= most:
            raise wrong(name, value, f"{least:g} to {most:g}")
        return float(value)

    def integer(self, name: str, least: int, most: int) -> int | None:
        """A whole number in a range; None where absent. 3.0 is taken for 3."""
        value = self.body.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise wrong(name, value, "a whole number")
        if not least <= value <= most:
            raise wrong(name, value, f"{least} to {most}")
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or false."""
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str = "") -> str:
        """A text."""
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise wrong(name, value, "a text")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An object; an empty one where absent."""
        value = self.body.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise wrong(name, value, "an object")
        return value

    def stops(self, name: str) -> tuple[str, ...]:
        """Stop strings: one, a list of some, or none."""
        value = self.body.get(name)
        stops = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise wrong(name, value, "a text or a list of texts")
        if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARACTERS for stop in stops):
            raise ApiError(
                400,
                f"{name}: at most {MAX_STOPS} texts of {MAX_STOP_CHARACTERS} characters are taken",
                param=name,
            )
        if any(not stop for stop in stops):
            raise ApiError(400, f"{name}: a stop string is empty", param=name)
        return tuple(dict.fromkeys(stops))

    def only_one(self, *names: str) -> None:
        """Refuse to give several answers to one request."""
        for name in names:
            value = self.integer(name, 0, 1 << 31)
            if value not in (None, 1):
                raise ApiError(
                    400,
                    f"{name}: {value} answers were asked for, this server gives one a request; "
                    "send the request several times",
                    param=name,
                )

    def refuse(self, name: str, why: str) -> None:
        """Refuse a field that asks for what cannot be done, unless it is empty or false."""
        if self.body.get(name):
            raise ApiError(400, f"{name}: {why}", param=name)


def wrong(name: str, value: object, wanted: str) -> ApiError:
    """Return the error of a field that is not as wanted."""
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return ApiError(400, f"{name}: found {shown}, wanted {wanted}", param=name)
