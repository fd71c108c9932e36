"""The frontend's side of the conversation with compute: joining, requests, their messages.

Runs on the event loop. ZeroMQ's raw descriptor is edge-triggered: it is drained until EVENTS shows
no POLLIN, and looked at again after each send. Invariants: nothing here blocks; when compute is
lost every generation fails at once, nothing is resent, and joining is tried again for ever; a
message for a generation that was given up is passed over.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq

from protocol.errors import HeadraceError
from protocol.wire import messages as m
from protocol.wire.codec import CodecError, decode, encode
from protocol.wire.limits import ATTACH_MS, HELLO_MS, STATS_MS
from protocol.wire.sockets import RuntimePaths, open_dealer

from .life_line import LifeLine

if TYPE_CHECKING:
    from protocol.wire.sockets import Socket

_LOG = logging.getLogger("headrace.frontend")
_RETRY_S = 0.05
_FLUSH_AGAIN_S = 0.01
_MAX_OUTGOING = 4096  # frames that compute has not taken yet
_MAX_FRAMES_AT_ONCE = 64
_PART_IDS = 100_000
_QUEUED_S = 5.0

Told = m.Queued | m.Progress | m.Tokens | m.Done


class ComputeLost(HeadraceError):
    """Compute is not there, or went away in the middle: try again later."""


class ComputeAbsent(ComputeLost):
    """Nobody is at compute's sockets: it has not started yet, or has ended."""


class NotNow(ComputeLost):
    """As ComputeLost, but clients are told its text alone: it says what they need to know."""


class ComputeRefused(HeadraceError):
    """Compute does not take this request.

    reason     one of REFUSALS
    retry_ms   when it may be taken, 0 where not known
    """

    def __init__(self, reason: str, text: str, retry_ms: int) -> None:
        super().__init__(text)
        self.reason = reason
        self.retry_ms = retry_ms


@dataclass(frozen=True, slots=True)
class Order:
    """What compute is asked to generate."""

    token_ids: tuple[int, ...]
    sampling: m.Settings
    grammar: bytes = b""
    deadline_ms: int = 0  # 0: none


class Generation:
    """One request in compute. Its messages come in order, the last one is Done."""

    def __init__(self, link: ComputeLink, number: int) -> None:
        self._link = link
        self._number = number
        self._arrived: asyncio.Queue[Told | HeadraceError] = asyncio.Queue()
        self._ended = False

    async def queued(self) -> m.Queued:
        """Wait until compute has taken the request. Raises ComputeRefused, ComputeLost."""
        try:
            async with asyncio.timeout(_QUEUED_S):
                told = await self.next()
        except TimeoutError:
            self.cancel()
            raise ComputeLost(f"compute took no request within {_QUEUED_S:g} s") from None
        if not isinstance(told, m.Queued):
            self.cancel()
            raise ComputeLost(f"compute answered {type(told).__name__} before Queued")
        return told

    async def next(self) -> Told:
        """Wait for the next message. Raises ComputeRefused, ComputeLost."""
        told = await self._arrived.get()
        if isinstance(told, HeadraceError):
            raise told
        return told

    def stop(self) -> None:
        """Ask compute to end it soon; its last messages still come."""
        if not self._ended:
            self._link.stop(self._number)

    def cancel(self) -> None:
        """Nobody waits for it any more; harmless once it has ended."""
        if not self._ended:
            self._ended = True
            self._link.give_up(self._number)

    def tell(self, told: Told | HeadraceError) -> None:
        """Put a message, or the error that ended it, for `next`."""
        if isinstance(told, m.Done | HeadraceError):
            self._ended = True
        self._arrived.put_nowait(told)


def _warn(why: str) -> None:
    _LOG.warning("no session with compute: %s", why)


def _nothing(_why: str) -> None:
    """Ending is no news."""


class ComputeLink:
    """A session with compute that is begun again whenever it ends; `run` keeps it."""

    def __init__(self, paths: RuntimePaths, fingerprint: bytes) -> None:
        self._paths = paths
        self._fingerprint = fingerprint
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._numbers = itertools.count(1)
        self._generations: dict[int, Generation] = {}
        self._reports: dict[int, asyncio.Future[m.StatusReport]] = {}
        self._dealer: Socket | None = None
        self._outgoing: deque[bytes] = deque()
        self._joined: m.Joined | None = None
        self._answer: asyncio.Future[m.Joined] | None = None
        self._lost: asyncio.Future[str] | None = None
        self.why = "compute has not answered yet"  # while there is no session
        self.n_sessions = 0
        self._is_refused = False
        self.first_joined = asyncio.Event()

    @property
    def joined(self) -> m.Joined | None:
        """What compute said when the session began; None while there is none."""
        return self._joined

    @property
    def n_generations(self) -> int:
        """Requests that have not ended."""
        return len(self._generations)

    def absence(self) -> ComputeLost:
        """Return what to tell of there being no session: before the first one the model loads."""
        if self.n_sessions or self._is_refused:
            return ComputeLost(self.why)
        return NotNow("the model is loading")

    def generate(self, order: Order) -> Generation:
        """Send a request. Raises ComputeLost where there is no session."""
        if self._joined is None:
            raise self.absence()
        number = next(self._numbers)
        generation = self._generations[number] = Generation(self, number)
        ids = order.token_ids
        while len(ids) > _PART_IDS:
            self._send(m.PromptPart(number, ids[:_PART_IDS]))
            ids = ids[_PART_IDS:]
        self._send(m.Generate(number, ids, order.sampling, order.deadline_ms, order.grammar))
        return generation

    def stop(self, number: int) -> None:
        """Cancel a generation whose Done is still wanted."""
        if number in self._generations and self._joined is not None:
            self._send(m.CancelGenerate(number))

    def give_up(self, number: int) -> None:
        """Cancel a generation; its further messages are passed over."""
        if self._generations.pop(number, None) is not None and self._joined is not None:
            self._send(m.CancelGenerate(number))

    def end_all(self, error: HeadraceError) -> None:
        """End every generation with an error; compute is told to leave them."""
        generations, self._generations = self._generations, {}
        for number, generation in generations.items():
            if self._joined is not None:
                self._send(m.CancelGenerate(number))
            generation.tell(error)

    async def status(self) -> m.Values:
        """What compute says about itself. Raises ComputeLost."""
        return (await self.report()).values

    async def report(self, *, tiers: bool = False) -> m.StatusReport:
        """The same, with where every expert is where that is asked for. Raises ComputeLost."""
        if self._joined is None:
            raise self.absence()
        number = next(self._numbers)
        report: asyncio.Future[m.StatusReport] = asyncio.get_running_loop().create_future()
        self._reports[number] = report
        self._send(m.Status(number, tiers))
        try:
            async with asyncio.timeout(STATS_MS / 1000):
                return await report
        except TimeoutError:
            raise ComputeLost(f"compute reported nothing within {STATS_MS} ms") from None
        finally:
            self._reports.pop(number, None)

    async def run(self) -> None:
        """Keep a session until cancelled."""
        try:
            while True:
                try:
                    self._end(await self._session())
                except ComputeAbsent as error:
                    self._end(str(error), logged=self._waits)
                except (ComputeLost, ComputeRefused) as error:
                    self._is_refused = isinstance(error, ComputeRefused)
                    self._end(str(error))
                await asyncio.sleep(_RETRY_S)
        finally:
            self._end("the frontend ends", logged=_nothing)
            self._context.term()

    def _waits(self, why: str) -> None:
        """Log that compute is not there: before the first session that is how a start looks."""
        if self.n_sessions:
            _warn(why)
        else:
            _LOG.info("waiting for the compute service, which loads the model")

    async def _session(self) -> str:
        """Join, and return why the session ended. Raises where it never began."""
        if not self._paths.socket.exists():
            raise ComputeAbsent(f"compute does not run: {self._paths.socket} does not exist")
        loop = asyncio.get_running_loop()
        self._answer, self._lost = loop.create_future(), loop.create_future()
        self._dealer = open_dealer(self._context, self._paths.socket)
        loop.add_reader(self._dealer.FD, self._drain)
        self._send(m.Join(m.PROTOCOL_VERSION, self._fingerprint, os.getpid()))
        try:
            async with asyncio.timeout(HELLO_MS / 1000):
                joined = await self._answer
        except TimeoutError:
            raise ComputeLost(f"compute did not answer Join within {HELLO_MS} ms") from None
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(ATTACH_MS / 1000):
                    life = await stack.enter_async_context(LifeLine(joined))
            except TimeoutError:
                raise ComputeLost("compute's life socket: no answer") from None
            except OSError as error:
                raise ComputeLost(f"compute's life socket: {error}") from None
            self._joined = joined
            self.n_sessions += 1
            self.first_joined.set()
            _LOG.info("joined the compute service, session %d", joined.session)
            ended = asyncio.create_task(life.end())
            ended.add_done_callback(lambda _task: self._lose("compute is gone"))
            try:
                return await self._lost
            finally:
                ended.cancel()

    def _end(self, why: str, logged: Callable[[str], None] = _warn) -> None:
        """There is no session any more: everything that waits for it fails."""
        if self._joined is not None or why != self.why:
            logged(why)
        self._joined = None
        self.why = why
        if self._dealer is not None:
            asyncio.get_running_loop().remove_reader(self._dealer.FD)
            self._dealer.close(linger=0)
            self._dealer = None
        self._outgoing.clear()
        self.end_all(ComputeLost(why))
        for report in self._reports.values():
            if not report.done():
                report.set_exception(ComputeLost(why))

    # sending

    def _send(self, message: m.Message) -> None:
        joined = self._joined
        session = (0, 0) if joined is None else (joined.session, joined.generation)
        self._outgoing.append(encode(message, *session))
        if len(self._outgoing) > _MAX_OUTGOING:
            self._lose("compute takes no messages")
        self._flush()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        while self._outgoing and self._dealer is not None:
            try:
                self._dealer.send(self._outgoing[0], zmq.NOBLOCK)
            except zmq.Again:
                loop.call_later(_FLUSH_AGAIN_S, self._flush)
                break
            self._outgoing.popleft()
        loop.call_soon(self._drain)  # a send may have used up the descriptor's edge

    # receiving

    def _drain(self) -> None:
        n_frames = 0
        while self._dealer is not None and int(self._dealer.get(zmq.EVENTS)) & zmq.POLLIN:
            try:
                frames = self._dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                continue
            self._receive(frames[0] if len(frames) == 1 else b"")
            n_frames += 1
            if n_frames == _MAX_FRAMES_AT_ONCE:
                asyncio.get_running_loop().call_soon(self._drain)
                return

    def _receive(self, frame: bytes) -> None:
        try:
            envelope = decode(frame)
        except CodecError as error:
            self._lose(f"compute sent what cannot be read: {error}")
            return
        message, joined = envelope.message, self._joined
        if isinstance(message, m.Joined):
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(message)
        elif isinstance(message, m.Refused):
            self._refused(message)
        elif joined is not None and envelope.session == joined.session:
            self._told(message)

    def _told(self, message: m.Message) -> None:
        if isinstance(message, m.Queued | m.Progress | m.Tokens | m.Done):
            generation = self._generations.get(message.id)
            if generation is not None:
                if isinstance(message, m.Done):
                    del self._generations[message.id]
                generation.tell(message)
        elif isinstance(message, m.StatusReport):
            report = self._reports.get(message.request)
            if report is not None and not report.done():
                report.set_result(message)
        elif isinstance(message, m.Ping):
            self._send(m.Pong(message.request))

    def _refused(self, refused: m.Refused) -> None:
        error = ComputeRefused(refused.reason, refused.text, refused.retry_ms)
        generation = self._generations.pop(refused.request, None)
        if generation is not None:
            generation.tell(error)
        elif self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        elif refused.reason in ("hello_first", "stale"):
            self._lose(f"compute knows this session no more: {refused.text}")
        else:
            _LOG.warning("compute refused (%s): %s", refused.reason, refused.text)

    def _lose(self, why: str) -> None:
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(why)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ComputeLost(why))
