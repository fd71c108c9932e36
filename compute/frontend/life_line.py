"""The connection to compute's life socket: open as long as the session is."""

from __future__ import annotations

import asyncio
import socket
from types import TracebackType
from typing import Self

from protocol.arena.attach import AttachRequest
from protocol.wire.messages import Joined

_OK = b"ok"
_MAX_PACKET = 256


class LifeLine:
    """An attached connection, made by entering it. Raises OSError where compute refuses it."""

    def __init__(self, joined: Joined) -> None:
        self._joined = joined
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)

    async def __aenter__(self) -> Self:
        try:
            self._socket.connect(self._joined.life_address)
            request = AttachRequest(self._joined.session, self._joined.generation)
            self._socket.send(request.pack())
            packet = await self._packet()
        except BaseException:
            self._socket.close()
            raise
        if packet != _OK:
            self._socket.close()
            raise OSError(packet.decode("utf-8", "replace") or "it hung up")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    async def end(self) -> None:
        """Wait until compute has hung up, or said anything: it never does otherwise."""
        await self._packet()

    async def _packet(self) -> bytes:
        """The next packet; b"" at the end."""
        loop = asyncio.get_running_loop()
        readable = loop.create_future()
        loop.add_reader(self._socket, _note, readable)
        try:
            await readable
        finally:
            loop.remove_reader(self._socket)
        try:
            return self._socket.recv(_MAX_PACKET)
        except OSError:
            return b""


def _note(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)
