"""How thoroughly the model is asked to think: a number from 1 to 100, or a name for one.

The model itself knows numbers only. Names are a table that the operator may change; 0 in it means
an answer without thinking. Source: model specification, section 11 (low 50, high 75, max 100 and
the aliases of the vendor's server library).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from protocol.errors import ConfigError

from .errors import RequestError

DEFAULT_EFFORTS: Mapping[str, int] = MappingProxyType(
    {
        "none": 0,
        "minimal": 50,
        "low": 50,
        "medium": 75,
        "high": 75,
        "xhigh": 75,
        "ultra": 100,
        "max": 100,
    }
)


@dataclass(frozen=True, slots=True)
class EncodingSettings:
    """What the operator decides about prompts."""

    default_thinking: bool = True  # for requests that do not say
    default_effort: int = 75  # 1 .. 100, for requests that think and name no effort
    efforts: Mapping[str, int] = field(default_factory=lambda: DEFAULT_EFFORTS)  # 0: no thinking

    def __post_init__(self) -> None:
        """Raise ConfigError on a number out of range."""
        check_effort(self.default_effort, "default_effort", least=1)
        for name, effort in self.efforts.items():
            check_effort(effort, f"efforts.{name}", least=0)

    def effort_of(self, value: object, param: str) -> int:
        """Return the effort that a request names, 0 for none. Raises RequestError."""
        if isinstance(value, str) and value in self.efforts:
            return self.efforts[value]
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 100:
            return value
        names = ", ".join(self.efforts)
        raise RequestError(
            f"{param}: {value!r} is neither a whole number from 1 to 100 nor one of {names}",
            param=param,
        )


def check_effort(value: object, where: str, *, least: int) -> int:
    """Return `value`, a whole number from `least` to 100. Raises ConfigError."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= 100:
        raise ConfigError(f"{where}: {value!r} is not a whole number from {least} to 100")
    return value


def read_efforts(raw: object, where: str) -> Mapping[str, int]:
    """Return the alias table of a config file: the default one, with `raw`'s names over it.

    "none" as a value is 0. Raises ConfigError.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where}: wanted a table of names and numbers, found {raw!r}")
    table = dict(DEFAULT_EFFORTS)
    for name, value in raw.items():
        table[str(name)] = check_effort(0 if value == "none" else value, f"{where}.{name}", least=0)
    return MappingProxyType(table)


def effort_line(effort: int) -> str:
    """Return the line that tells the model how thoroughly to think."""
    scale = "range 1-100, the higher the value, the more thorough the reasoning"
    return f"Reasoning Effort: {effort} ({scale})\n\n"
