"""How a session begins: Hello until Welcome, then the arena's descriptor."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import zmq

from protocol.arena.attach import AttachRequest, attach
from protocol.errors import DaemonBusy, DaemonLost, ProtocolError

from .codec import decode, encode
from .connection import Connection, Deadline, Ends, check_agreement
from .limits import ATTACH_MS, HELLO_AGAIN_MS
from .messages import Hello, Message, Refused, Welcome
from .sockets import open_dealer

if TYPE_CHECKING:
    from pathlib import Path

    from .sockets import Context, Socket

_OTHER_MODEL = "; it serves another model: give --runtime-dir of another daemon, or stop it"


def open_connection(context: Context, path: Path, hello: Hello, deadline: Deadline) -> Connection:
    """Say Hello until welcomed, then fetch the arena's descriptor.

    Raises DaemonLost where no daemon answers in time, DaemonBusy where another engine stays,
    ProtocolError where the daemon refuses or its arena is not as announced.
    """
    while True:
        dealer = open_dealer(context, path)
        try:
            welcome = _say_hello(dealer, path, hello, deadline)
            if welcome is not None:
                return _attached(dealer, path, welcome)
        except BaseException:
            dealer.close()
            raise
        # The daemon that heard it may have died since; its successor has to hear it too.
        dealer.close()


def _attached(dealer: Socket, path: Path, welcome: Welcome) -> Connection:
    attached = attach(
        welcome.descriptor_address,
        AttachRequest(welcome.session, welcome.generation),
        n_bytes=welcome.arena_bytes,
        arena_id=welcome.arena_id,
        timeout_s=ATTACH_MS / 1000,
    )
    try:
        check_agreement(welcome, attached)
        return Connection(dealer, path, Ends(welcome, attached))
    except BaseException:
        attached.close()
        raise


def _say_hello(dealer: Socket, path: Path, hello: Hello, deadline: Deadline) -> Welcome | None:
    """The Welcome, or None where it is time to try on a new socket."""
    frame = encode(hello)
    busy: DaemonBusy | None = None
    while True:
        if not dealer.poll(deadline.left_ms, zmq.POLLOUT):
            raise DaemonLost(
                f"{path}: no daemon accepted a connection within {deadline.total_ms:g} ms"
            )
        dealer.send(frame, zmq.NOBLOCK)
        if not dealer.poll(min(deadline.left_ms, HELLO_AGAIN_MS), zmq.POLLIN):
            if deadline.left_ms > 0:
                return None
            if busy is not None:  # the time left was too short for one more answer
                raise busy
            raise DaemonLost(
                f"{path}: connected, but no answer to Hello within {deadline.total_ms:g} ms"
            )
        answer = decode(dealer.recv(zmq.NOBLOCK)).message
        if isinstance(answer, Welcome):
            return answer
        busy = _wait_where_busy(path, answer, deadline)


def _wait_where_busy(path: Path, answer: Message, deadline: Deadline) -> DaemonBusy:
    """Sleep until Hello may be said again, and return why; raises where that has no sense."""
    if not isinstance(answer, Refused):
        raise ProtocolError(f"{path}: Hello was answered by {type(answer).__name__}")
    if answer.reason != "busy":
        advice = _OTHER_MODEL if answer.reason == "fingerprint" else ""
        raise ProtocolError(f"{path}: Hello refused ({answer.reason}): {answer.text}{advice}")
    pid = f" (pid {answer.pid})"
    named = answer.text if pid in answer.text else answer.text + pid
    busy = DaemonBusy(f"{path}: {named}", answer.pid)
    if answer.retry_ms == 0 or answer.retry_ms >= deadline.left_ms:
        raise busy
    time.sleep(answer.retry_ms / 1000)
    return busy
