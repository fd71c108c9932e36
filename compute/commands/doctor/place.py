"""Where the processes meet and what they keep: the runtime and state directories, a live daemon."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import ConfigError, HeadraceError, ProtocolError

from .check import Check

HELLO_MS = 1500
STATE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class LiveDaemon:
    """What a daemon that runs says of itself."""

    arena_bytes: int = 0


def no_runtime_dir() -> Check:
    """Return that nobody has said where the sockets are, and what to do about it."""
    found = (
        "none: /run/headrace does not belong to this user, and XDG_RUNTIME_DIR is not set; "
        "`headrace daemon` does not start, and no command finds a daemon that runs"
    )
    fix = (
        "mkdir -m 0700 ~/.headrace, then give --runtime-dir ~/.headrace to every command; or log "
        "in over ssh or at a console, which sets XDG_RUNTIME_DIR (su, sudo and containers do not); "
        "for the installed services: sudo -u headrace headrace doctor"
    )
    wanted = "/run/headrace of this user, $XDG_RUNTIME_DIR, or --runtime-dir"
    return Check("runtime directory", "warning", found, wanted, fix)


def runtime_dir_check(directory: Path) -> Check:
    """Return whether sockets may be there and nobody else may write."""
    from protocol.runtime_dir import check_runtime_dir

    wanted = "ours, mode 0700, or absent"
    try:
        check_runtime_dir(directory)
        found = directory.lstat()
    except ConfigError as error:
        return Check("runtime directory", "error", str(error), wanted, "a shorter --runtime-dir")
    except FileNotFoundError:
        return Check("runtime directory", "ok", f"{directory}: made at the first start", wanted)
    except OSError as error:
        text = f"{directory}: {error.strerror}"
        return Check("runtime directory", "error", text, wanted, "another --runtime-dir")
    mode = stat.S_IMODE(found.st_mode)
    text = f"{directory}: mode {mode:04o}, of user {found.st_uid}"
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        fix = f"run this as user {found.st_uid}, or give another --runtime-dir"
        return Check("runtime directory", "error", text, wanted, fix)
    if mode & 0o022:
        fix = f"chmod 0700 {directory}"
        return Check("runtime directory", "error", text, wanted, fix)
    if mode & 0o077:
        fix = f"chmod 0700 {directory}"
        return Check("runtime directory", "warning", text, wanted, fix)
    return Check("runtime directory", "ok", text, wanted)


def daemon_check(directory: Path, fingerprint: bytes) -> tuple[Check, LiveDaemon]:
    """Ask a daemon in `directory`, where there is one, for its version and its arena.

    fingerprint   of the model that it should serve; empty: any
    """
    from compute.commands.children import daemon_runs
    from protocol.wire.client import ExpertClient
    from protocol.wire.messages import PROTOCOL_VERSION

    ours = ".".join(map(str, PROTOCOL_VERSION))
    wanted = f"none, or one of wire version {ours}" + (" with this model" if fingerprint else "")
    if not daemon_runs(directory):
        return Check("daemon", "ok", f"none runs in {directory}", wanted), LiveDaemon()
    fix = "restart it with the headrace and the model that are used here"
    try:
        with ExpertClient(directory, fingerprint=fingerprint, hello_ms=HELLO_MS) as client:
            live = LiveDaemon(client.welcome.arena_bytes)
            found = f"one runs, wire version {ours}, generation {client.welcome.generation}"
            return Check("daemon", "ok", found, wanted), live
    except (ConfigError, ProtocolError) as error:
        return Check("daemon", "error", str(error), wanted, fix), LiveDaemon()
    except HeadraceError as error:
        found = f"one runs but does not answer: {error}"
        return Check("daemon", "error", found, wanted, "look at its log"), LiveDaemon()


def state_dir_checks(directory: Path) -> Iterator[Check]:
    """Yield whether the state directory can be written to and has room."""
    from .drive import free_disk

    place = directory
    while not place.exists() and place != place.parent:
        place = place.parent
    if not os.access(place, os.W_OK | os.X_OK):
        fix = f"make {directory} and give it to user {os.geteuid()}, or give another --state-dir"
        yield Check("state directory", "error", f"{place} is not writable", "a writable one", fix)
    else:
        yield Check("state directory", "ok", str(directory), "a writable one")
    yield free_disk("state disk", directory, STATE_BYTES, "for checksums, hot list and traces")
