"""Descriptors that a process finds open at its start, and starting a process with some.

The convention is systemd's: LISTEN_FDS descriptors from number 3 on, their names in LISTEN_FDNAMES,
LISTEN_PID the process they are for. A parent cannot know that number beforehand and leaves
LISTEN_PID out; the receiver removes all three, so that its own children do not see them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from protocol.errors import ConfigError

FIRST_DESCRIPTOR = 3
MOST_DESCRIPTORS = 64
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


def listen_descriptors(environ: MutableMapping[str, str] | None = None) -> dict[str, int]:
    """{name: descriptor} of what was passed to this process; empty where nothing was.

    The variables are removed and the descriptors made close-on-exec. Of two with one name the first
    counts and the other is closed. Raises ConfigError where a variable makes no sense.
    """
    environ = os.environ if environ is None else environ
    pid, number, names = (environ.pop(variable, "") for variable in _VARIABLES)
    if not number or (pid and pid != str(os.getpid())):
        return {}
    if not number.isdecimal() or int(number) > MOST_DESCRIPTORS:
        raise ConfigError(f"LISTEN_FDS: found {number!r}, wanted 0 to {MOST_DESCRIPTORS}")
    n_passed = int(number)
    named = names.split(":") if names else []
    if named and len(named) != n_passed:
        raise ConfigError(f"LISTEN_FDNAMES: {len(named)} names for {n_passed} descriptors")
    passed: dict[str, int] = {}
    for place in range(n_passed):
        descriptor = FIRST_DESCRIPTOR + place
        _close_on_exec(descriptor)
        name = named[place] if named else "unknown"
        if name in passed:
            os.close(descriptor)
        else:
            passed[name] = descriptor
    return passed


def _close_on_exec(descriptor: int) -> None:
    try:
        os.set_inheritable(descriptor, False)
    except OSError as error:
        raise ConfigError(f"LISTEN_FDS: descriptor {descriptor}: {error.strerror}") from None


def start_with_descriptors(
    command: Sequence[str],
    descriptors: Mapping[str, int],
    *,
    environ: Mapping[str, str],
    before_exec: Callable[[], None] | None = None,
    **popen: Any,
) -> subprocess.Popen[bytes]:
    """Start a process that finds these descriptors by listen_descriptors().

    before_exec runs in the child after the descriptors are in place; it must not take locks.
    """
    for name in descriptors:
        if not name or not name.isascii() or not name.isprintable() or ":" in name:
            raise ConfigError(f"descriptor name {name!r}: wanted printable ASCII without ':'")
    last = FIRST_DESCRIPTOR + len(descriptors) - 1
    child = {key: value for key, value in environ.items() if key not in _VARIABLES}
    if descriptors:
        child["LISTEN_FDS"] = str(len(descriptors))
        child["LISTEN_FDNAMES"] = ":".join(descriptors)
    # Copies above the target numbers, so that no dup2 in the child overwrites one still needed.
    copies = [_copy_above(descriptor, last) for descriptor in descriptors.values()]
    # Nor may subprocess' own pipes take a target number: all are in use while it makes them.
    fillers = _fill_up_to(last)

    def arrange() -> None:
        for place, copy in enumerate(copies):
            os.dup2(copy, FIRST_DESCRIPTOR + place, inheritable=True)
        if before_exec is not None:
            before_exec()

    try:
        return subprocess.Popen(
            command,
            env=child,
            pass_fds=tuple(range(FIRST_DESCRIPTOR, last + 1)),
            preexec_fn=arrange,  # noqa: PLW1509 - dup2 is all that runs before exec
            **popen,
        )
    finally:
        for descriptor in (*copies, *fillers):
            os.close(descriptor)


def _copy_above(descriptor: int, last: int) -> int:
    low = []
    try:
        copy = os.dup(descriptor)
        while copy <= last:
            low.append(copy)
            copy = os.dup(descriptor)
        return copy
    finally:
        for number in low:
            os.close(number)


def _fill_up_to(last: int) -> list[int]:
    fillers: list[int] = []
    while True:
        filler = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        if filler > last:
            os.close(filler)
            return fillers
        fillers.append(filler)
