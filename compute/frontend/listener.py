"""The socket that HTTP comes in by."""

from __future__ import annotations

import socket

from protocol.errors import ConfigError

from .config import FrontendConfig


def listen(config: FrontendConfig) -> socket.socket:
    """Return a socket bound to the address in the settings. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{config.host} port {config.port}: cannot be bound: {error.strerror or error}; "
            "choose another --port or --host"
        ) from None
    return listener
