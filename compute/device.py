"""Whether torch reaches a device.

Run as `python -m compute.device NAME`: exit status 2 and a line where it cannot be used.
"""

from __future__ import annotations

import sys

import torch

from protocol.errors import ConfigError

from .device_name import device_name

_ADVICE = "use --device cpu or auto; headrace doctor says what torch sees"


def reach_device(name: str) -> torch.device:
    """Return the device cpu, cuda or cuda:N. Raises ConfigError where torch cannot use it."""
    try:
        device = torch.device(device_name(name, "--device"))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--device: {name!r} cannot be used: {reason}; {_ADVICE}") from error
    return device


def main(name: str) -> int:
    """Return the exit status."""
    try:
        reach_device(name)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
