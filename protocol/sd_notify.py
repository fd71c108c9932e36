"""Telling systemd how a service does, by datagrams to the socket that it names.

Where no socket is named there is nobody to tell, and that is no error.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Mapping, Sequence


def notify(
    state: str, descriptors: Sequence[int] = (), environ: Mapping[str, str] | None = None
) -> bool:
    """Send a state such as "READY=1" or "STATUS=serving"; True where it was sent.

    state        lines "NAME=value", separated by newlines
    descriptors  what a state with "FDSTORE=1" and "FDNAME=arena" is to keep
    environ      where NOTIFY_SOCKET stands, the process' environment by default
    """
    address = (os.environ if environ is None else environ).get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    ancillary = []
    if descriptors:
        packed = array.array("i", descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as connection:
        try:
            connection.sendmsg([state.encode()], ancillary, socket.MSG_NOSIGNAL, address)
        except OSError:
            return False  # a service does not die of a supervisor that does not listen
    return True
