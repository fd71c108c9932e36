"""`python -m compute`: the compute service. It owns the model; frontends send it requests.

The expert daemon must run in the same runtime directory, or come within `--daemon-wait-s`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from protocol.errors import ConfigError, HeadraceError
from protocol.flag_parser import FlagParser
from protocol.open_files import raise_descriptor_limit
from protocol.setting_names import unknown_variables

from .config import MODEL_OPTIONS, SERVICE_OPTIONS, add_config_arguments, load_config


def main(arguments: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status, on an error 1, or 2 for a setting."""
    parser = FlagParser(
        prog="python -m compute",
        description="Run one model's requests, its experts from the expert daemon.",
    )
    add_config_arguments(parser, MODEL_OPTIONS + SERVICE_OPTIONS)
    args = parser.parse_args(arguments)
    raise_descriptor_limit()
    logging.basicConfig(level=logging.INFO, format="compute: %(message)s", stream=sys.stderr)
    for line in unknown_variables(os.environ).values():
        sys.stderr.write(f"compute: {line}\n")
    try:
        config = load_config(args, os.environ)
        from .serving.service import serve  # noqa: PLC0415 - settings are read before torch is

        serve(config, os.environ)
    except HeadraceError as error:
        sys.stderr.write(f"compute: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
