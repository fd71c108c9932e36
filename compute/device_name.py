"""How a device is named in settings. Imports no torch."""

from __future__ import annotations

import re

from protocol.errors import ConfigError

AUTO_DEVICE = "auto"
_NAME = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")


def device_name(value: object, where: str) -> str:
    """auto, cpu, cuda or cuda:N. Raises ConfigError on any other value."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ConfigError(f"{where}: {value!r} is none of {AUTO_DEVICE}, cpu, cuda and cuda:N")
    return value
