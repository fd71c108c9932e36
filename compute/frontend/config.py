"""The frontend process's settings: one frozen dataclass, read once and handed down.

How they are written and which one wins stands in compute/options.py; compute's settings may stand
in the same file. Invariant: an address that other machines can reach is never bound to without a
token file.
"""

from __future__ import annotations

import argparse
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from compute.options import Option, add_flags, count, number, path, read_options, switch, text
from protocol.errors import ConfigError
from protocol.runtime_dir import check_runtime_dir, default_runtime_dir
from protocol.sizes import parse_size

from .encoding import EncodingSettings, read_efforts

_DEFAULTS = EncodingSettings()


@dataclass(frozen=True, slots=True)
class FrontendConfig:
    """What the frontend was told."""

    model: str = "demo"  # model directory, .gguf file, or `demo` for the packaged one
    runtime_dir: Path | None = None  # compute's; None: the default one
    host: str = "127.0.0.1"  # address to listen on
    port: int = 8080  # 0: one that is free
    token_file: Path | None = None  # one bearer token a line; None: any passes, loopback only
    served_name: str | None = None  # what the model is called; None: as its directory
    chat_template: Path | None = None  # Jinja file used instead of the model's own form
    default_thinking: bool = _DEFAULTS.default_thinking  # for requests that do not say
    default_effort: int = _DEFAULTS.default_effort  # 1 .. 100
    efforts: Mapping[str, int] = field(default_factory=lambda: _DEFAULTS.efforts)
    temperature: float = 1.0  # for requests that do not say, as the next three
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    max_body: int = 32 << 20  # bytes of a request's body
    max_depth: int = 64  # how deep its JSON may nest
    max_connections: int = 512
    request_timeout_s: float = 0.0  # queue and generation together; 0: no limit
    write_timeout_s: float = 60.0  # a client that takes nothing for so long is hung up on
    drain_s: float = 30.0  # how long requests may still run after SIGTERM

    def __post_init__(self) -> None:
        """Raise ConfigError on an address that needs a token."""
        if self.token_file is None and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host}: other machines could reach it; name a file of bearer tokens "
                "with --token-file, or listen on 127.0.0.1"
            )

    def find_runtime_dir(self, environment: Mapping[str, str]) -> Path:
        """Return the runtime directory given, else the default one. Raises ConfigError."""
        return check_runtime_dir(self.runtime_dir or default_runtime_dir(environment))

    def encoding(self) -> EncodingSettings:
        """Return what shapes prompts."""
        return EncodingSettings(self.default_thinking, self.default_effort, self.efforts)


def is_loopback(host: str) -> bool:
    """Whether an address or name can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_tokens(file: Path) -> tuple[bytes, ...]:
    """Return the tokens of a file, one a line; lines that begin with # do not count.

    Raises ConfigError where it cannot be read, holds none, or others may read it.
    """
    try:
        mode = file.stat().st_mode
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    if mode & 0o077:
        raise ConfigError(f"{file}: others may read it (mode {mode & 0o777:04o}); wanted 0600")
    tokens = [line.strip() for line in lines]
    found = tuple(token.encode() for token in tokens if token and not token.startswith("#"))
    if not found:
        raise ConfigError(f"{file}: holds no token")
    return found


def _efforts(value: object, where: str) -> Mapping[str, int]:
    return MappingProxyType(dict(read_efforts(value, where)))


FRONTEND_OPTIONS: Mapping[str, Option] = {
    "model": Option(text, "MODEL", "model directory, .gguf file, or demo for the packaged model"),
    "runtime_dir": Option(path, "DIR", "where compute's sockets are"),
    "host": Option(text, "ADDRESS", "address to listen on"),
    "port": Option(count(0, 65535), "N", "port to listen on; 0: one that is free"),
    "token_file": Option(path, "FILE", "bearer tokens, one a line; the file must be private"),
    "served_name": Option(text, "NAME", "what the model is called (default: its directory)"),
    "chat_template": Option(path, "FILE", "Jinja template used instead of the model's own form"),
    "default_thinking": Option(switch, None, "think where a request does not say", has_flag=False),
    "default_effort": Option(count(1, 100), "N", "effort of thinking where a request names none"),
    "efforts": Option(_efforts, None, "names of efforts", has_flag=False),
    "temperature": Option(number(0, 100), "T", "where a request does not say"),
    "top_p": Option(number(1e-9, 1), "P", "where a request does not say"),
    "top_k": Option(count(0, 2**31), "K", "where a request does not say; 0 keeps all"),
    "min_p": Option(number(0, 1), "P", "where a request does not say"),
    "max_body": Option(parse_size, "SIZE", "the largest request body"),
    "max_depth": Option(count(2, 500), "N", "how deep a body's JSON may nest"),
    "max_connections": Option(count(1, 65536), "N", "connections at once"),
    "request_timeout_s": Option(number(0, 1e6), "SECONDS", "end a request after; 0: never"),
    "write_timeout_s": Option(
        number(0.1, 1e6), "SECONDS", "hang up on a client that reads nothing"
    ),
    "drain_s": Option(number(0, 1e6), "SECONDS", "let requests end for so long after SIGTERM"),
}
HTTP_OPTIONS = tuple(
    name
    for name in FRONTEND_OPTIONS
    if name not in ("model", "runtime_dir", "temperature", "top_p", "top_k", "min_p")
)


def add_frontend_arguments(
    parser: argparse.ArgumentParser, names: tuple[str, ...] = tuple(FRONTEND_OPTIONS)
) -> None:
    """Add the flag of each named setting."""
    defaults: dict[str, Any] = {field.name: field.default for field in fields(FrontendConfig)}
    add_flags(parser, {name: FRONTEND_OPTIONS[name] for name in names}, defaults)


def load_encoding(
    args: argparse.Namespace, environment: Mapping[str, str], also_known: tuple[str, ...]
) -> tuple[EncodingSettings, Path | None]:
    """Return what shapes prompts, and the chat template, as a frontend finds them.

    For commands that make prompts and serve nothing. Raises ConfigError.
    """
    found = read_options(
        FRONTEND_OPTIONS, args, environment, process="frontend", also_known=also_known
    )
    settings = EncodingSettings(
        found.get("default_thinking", _DEFAULTS.default_thinking),
        found.get("default_effort", _DEFAULTS.default_effort),
        found.get("efforts", _DEFAULTS.efforts),
    )
    return settings, found.get("chat_template")


def load_frontend_config(
    args: argparse.Namespace, environment: Mapping[str, str], also_known: tuple[str, ...]
) -> FrontendConfig:
    """Return the settings from parsed flags, the environment and the file. Raises ConfigError."""
    return FrontendConfig(
        **read_options(
            FRONTEND_OPTIONS, args, environment, process="frontend", also_known=also_known
        )
    )
