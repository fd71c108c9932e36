"""Lists as people write them on a command line: "a,b,c" to its parts."""

from __future__ import annotations

from .errors import ConfigError


def split_list(text: str, where: str, wanted: str) -> list[str]:
    """Return the parts between the commas, spaces around them taken off.

    Raises ConfigError naming `where`, what was found and what is `wanted`, where a part is empty:
    a list that a script put together from an unset variable is a mistake, not a shorter list.
    """
    parts = [part.strip() for part in text.split(",")]
    if "" in parts:
        found = f"part {parts.index('') + 1} of {text!r}" if len(parts) > 1 else repr(text)
        raise ConfigError(f"{where}: {found} is empty, wanted {wanted}")
    return parts
