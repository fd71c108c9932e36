"""Sizes as people write them: "96GiB" to bytes and back."""

from __future__ import annotations

import re

from .errors import ConfigError

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE = re.compile(r"\s*(\d+)(?:\.(\d+))?\s*([a-zA-Z]*)\s*", re.ASCII)


def parse_size(value: object, where: str) -> int:
    """Return the bytes that `value` means: 4096, "4096", "1.5GiB", "96 GiB", "2MB".

    Raises ConfigError naming `where`.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[3].lower() not in _UNITS:
        raise ConfigError(f'{where}: {value!r} is not a size such as "96GiB" or 4096')
    whole, fraction, unit = match[1], match[2] or "", match[3]
    scale = 10 ** len(fraction)
    return int(int(whole + fraction) * _UNITS[unit.lower()] // scale)


def format_size(n_bytes: int) -> str:
    """Return `n_bytes` for people: "512 B", "14.8 MiB", "96.0 GiB"."""
    if n_bytes < 1024:
        return f"{n_bytes} B"
    value, unit = float(n_bytes), "B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):  # noqa: B007
        value /= 1024
        if value < 1024:
            break
    return f"{value:.1f} {unit}"
