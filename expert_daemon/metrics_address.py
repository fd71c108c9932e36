"""Where the metrics are served: loopback or a Unix socket, never the network."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from protocol.errors import ConfigError
from protocol.runtime_dir import MAX_SOCKET_PATH_BYTES


@dataclass(frozen=True, slots=True)
class MetricsAddress:
    """One of the two: `path` of a Unix socket, or `host` and `port`."""

    path: str = ""
    host: str = ""
    port: int = 0


def parse_address(text: str, where: str = "--metrics") -> MetricsAddress:
    """Return the address in "unix:/run/x.sock", "127.0.0.1:9464", "[::1]:9464", "localhost:9464".

    Raises ConfigError for any other, and for one that others than this machine could reach.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path.startswith("/") or len(path.encode()) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"{where}: {path!r} is no absolute path of at most {MAX_SOCKET_PATH_BYTES} bytes"
            )
        return MetricsAddress(path=path)
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"{where}: {text!r}, wanted 127.0.0.1:PORT or unix:/PATH")
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise ConfigError(f"{where}: {host!r} is no address; wanted 127.0.0.1 or ::1") from None
    if not address.is_loopback:
        raise ConfigError(
            f"{where}: {host} can be reached from outside; wanted a loopback address, or unix:/PATH"
        )
    return MetricsAddress(host=str(address), port=int(port))
