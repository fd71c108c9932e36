"""`python -m compute.frontend`: the HTTP server in front of the compute service. Loads no torch."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from compute.config import COMPUTE_KEYS
from protocol.errors import ConfigError, HeadraceError
from protocol.flag_parser import FlagParser
from protocol.open_files import raise_descriptor_limit
from protocol.setting_names import unknown_variables

from .config import add_frontend_arguments, load_frontend_config
from .server import run


def main(arguments: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status, on an error 1, or 2 for a setting."""
    parser = FlagParser(
        prog="python -m compute.frontend",
        description="OpenAI's and Anthropic's APIs over HTTP, in front of the compute service.",
    )
    parser.add_argument("--config", metavar="FILE.toml", help="settings; flags win over it")
    add_frontend_arguments(parser)
    args = parser.parse_args(arguments)
    raise_descriptor_limit()
    logging.basicConfig(level=logging.INFO, format="frontend: %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # it also tells of plain starts
    for line in unknown_variables(os.environ).values():
        sys.stderr.write(f"frontend: {line}\n")
    try:
        run(load_frontend_config(args, os.environ, COMPUTE_KEYS), os.environ)
    except HeadraceError as error:
        sys.stderr.write(f"frontend: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
