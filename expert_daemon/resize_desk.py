"""The arena made smaller or larger while it serves.

Runs on the loop's thread, but for what takes memory and gives it back. Order is everything: a slot
is used only when its memory is there and the engine says that it can read it; memory is given back
only when nothing can name its slots and the engine says that it has let go of them. What is
populated never exceeds the larger of the old and the new size. A shrink that nobody let go of
memory for is undone by a Resize back up, a grow that the engine has not acknowledged by a shrink of
what it was told of; a session waits with one request at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from protocol.errors import ConfigError
from protocol.sizes import format_size
from protocol.wire.messages import Ack, Added, Cancel, Drop, Dropped, Resize, Resized

from .advice_desk import AdviceDesk
from .log import ClientLog
from .outbox import Outbox
from .sessions import Session, Sessions
from .works import Works


@dataclass(slots=True)
class _Change:
    """A resize under way.

    populated  the added memory is there
    releasing  nobody names the slots any more, their memory is being given back
    told       the engine's session that was sent Drop or Added, 0: none
    """

    n_slots: int  # wanted
    before: int
    waiters: dict[int, int]  # the request of each session that waits for the end
    populated: bool = False
    releasing: bool = False
    told: int = 0

    @property
    def grows(self) -> bool:
        """Whether slots are added."""
        return self.n_slots > self.before

    def may_become(self, n_slots: int, readable: int) -> bool:
        """Whether another size may be gone to instead: of a shrink a smaller shrink, or none.

        Of a grow, once it is populated, a shrink to slots that were used before it.
        """
        if self.grows:
            return self.populated and n_slots <= readable
        return not self.told and not self.releasing and self.n_slots < n_slots <= readable


class ResizeDesk:
    """One resize at a time."""

    def __init__(
        self,
        sessions: Sessions,
        outbox: Outbox,
        works: Works,
        advice: AdviceDesk,
        loop: asyncio.AbstractEventLoop,
        settle: Callable[[], None],
        clients: ClientLog,
    ) -> None:
        self._sessions = sessions
        self._outbox = outbox
        self._advice = advice
        self._size = works.size
        self._cache = works.loading.cache
        self._loop = loop
        self._settle = settle
        self._clients = clients
        self._change: _Change | None = None
        self._readable = self._size.n_slots  # that may be used: an engine could read them

    def resize(self, session: Session, message: Resize) -> None:
        """Begin a resize; Resized comes when it has ended, or at once where it cannot be."""
        number, request = session.number, message.request
        if self._change is not None and self._change.waiters.get(number) == request:
            return
        try:
            n_slots = self._size.plan(message.n_bytes).n_slots
        except ConfigError as error:
            self._answer(number, request, str(error))
            return
        change = self._change
        if change is None and n_slots == self._size.n_slots:
            self._answer(number, request, "")
        elif change is None:
            self._start(n_slots, number, request)
        elif change.n_slots == n_slots:
            self._join(change, number, request)
        elif change.may_become(n_slots, self._readable):
            self._give_up(change, n_slots)
            self.resize(session, message)
        else:
            n_bytes = format_size(self._size.bytes_of(change.n_slots))
            text = f"a resize to {n_bytes} is under way, {self._waits(change)}: wait for its end"
            self._answer(number, request, text)

    def _start(self, n_slots: int, number: int, request: int) -> None:
        self._change = _Change(n_slots, self._size.n_slots, {number: request})
        self._clients.note(f"resizing from {self._change.before} to {n_slots} slots")
        self._begin(self._change)

    def _join(self, change: _Change, number: int, request: int) -> None:
        """Let a session wait, with this request instead of an earlier one."""
        earlier = change.waiters.pop(number, None)
        if earlier is not None:
            self._answer(number, earlier, f"request {request} waits for it instead")
        known = self._sessions.by_number
        change.waiters = {one: waits for one, waits in change.waiters.items() if one in known}
        change.waiters[number] = request

    def _give_up(self, change: _Change, n_slots: int) -> None:
        """End a change of which all memory is there still, since this size is wanted instead."""
        wanted = format_size(self._size.bytes_of(n_slots))
        self._end(change, f"the resize to {change.n_slots} slots was given up: {wanted} is wanted")
        if n_slots == change.before and not change.grows:
            self._set_budget(n_slots)
            self._advice.warm_displaced()

    def _begin(self, change: _Change) -> None:
        if change.grows:
            self._aside(self._populate, change)
        else:
            self._set_budget(change.n_slots)

    def _aside(self, work: Callable[[_Change, int], Callable[[], None]], change: _Change) -> None:
        """Do a change's work on memory on a thread of its own, and then what it returns here.

        The daemon may end meanwhile: the work has a descriptor of its own, and nobody is told.
        """
        descriptor = self._size.descriptor()

        def run() -> None:
            try:
                then = work(change, descriptor)
            finally:
                os.close(descriptor)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._go_on, then)

        threading.Thread(target=run, daemon=True).start()

    def _go_on(self, then: Callable[[], None]) -> None:
        then()
        self._settle()
        self._outbox.look_again()

    def _set_budget(self, n_slots: int) -> None:
        size = self._size
        size.set_budget(n_slots)
        self._cache.resize(
            n_slots, free_pool=size.budget.free_pool, lease_quota=size.budget.lease_quota
        )

    def _populate(self, change: _Change, descriptor: int) -> Callable[[], None]:
        text = ""
        try:
            self._size.populate(descriptor, change.n_slots)
        except ConfigError as error:
            text = str(error)
        return partial(self._populated, change, text)

    def _populated(self, change: _Change, text: str) -> None:
        if text:
            self._end(change, text)
        else:
            # A successor from here on uses them, and its Welcome says so to the engine.
            self._size.use(change.n_slots)
            change.populated = True

    def advance(self) -> None:
        """Go on where that has become possible; call it after every event."""
        change = self._change
        if change is None or change.releasing:
            return
        if change.grows and not change.populated:
            return
        if not change.grows and self._cache.n_closing:
            return
        if not self._cache.has_engine:
            self._finish(change)
            return
        engine = self._sessions.engine
        if engine is not None and engine.is_attached and change.told != engine.number:
            change.told = engine.number
            self._tell(engine, change)

    def _tell(self, engine: Session, change: _Change) -> None:
        low, high = sorted((change.n_slots, change.before))
        chunks = self._size.chunks(low, high)
        max_experts = self._size.budget_of(change.n_slots).max_experts
        kind = Added if change.grows else Drop
        self._outbox.send(engine, kind(chunks, change.n_slots, max_experts))

    def dropped(self, session: Session, message: Dropped) -> None:
        """The engine has let go of the chunks."""
        change = self._change
        if change is None or change.grows or change.releasing or change.told != session.number:
            return
        if message.chunks == self._size.chunks(change.n_slots, change.before):
            self._finish(change)

    def acked(self, session: Session, message: Ack) -> None:
        """The engine says how many slots it can read; 0: as many as it was told of."""
        change = self._change
        if change is None or not change.grows or change.told != session.number:
            return
        if message.n_slots == 0 or message.n_slots >= change.n_slots:
            self._finish(change)

    def _finish(self, change: _Change) -> None:
        self._readable = change.n_slots
        if change.grows:
            self._set_budget(change.n_slots)
            self._end(change, "")
        else:
            self._size.use(change.n_slots)
            change.releasing = True
            self._aside(self._release, change)

    def _release(self, change: _Change, descriptor: int) -> Callable[[], None]:
        try:
            is_all = self._size.release(descriptor, change.n_slots)
            left = "" if is_all else "a drive writes beside it without a pause"
        except OSError as error:
            left = str(error)
        return partial(self._released, change, left)

    def _released(self, change: _Change, left: str) -> None:
        if left:
            self._clients.note(f"some of the memory could not be given back: {left}")
        self._advice.warm_displaced()
        self._end(change, "")

    def _end(self, change: _Change, text: str) -> None:
        self._change = None
        n_bytes = self._size.n_bytes
        self._clients.note(text or f"resized to {self._size.n_slots} slots, {format_size(n_bytes)}")
        for number, request in change.waiters.items():
            self._answer(number, request, text)
        self._loop.call_soon(self._settle)  # there may be reads to begin now

    def cancel(self, session: Session, message: Cancel) -> bool:
        """Answer a resize that is waited for no longer, which goes on; False where it is none."""
        change = self._change
        if change is None or change.waiters.get(session.number) != message.request:
            return False
        del change.waiters[session.number]
        text = f"the resize to {change.n_slots} slots goes on: {self._waits(change)}"
        self._answer(session.number, message.request, text)
        return True

    def _waits(self, change: _Change) -> str:
        """What a change waits for."""
        if change.releasing:
            return "its memory is being given back"
        if change.told or change.populated:
            return "the engine has not answered yet"
        if change.grows:
            return "it is being populated"
        return f"{self._cache.n_closing} slots are still in use"

    def _answer(self, number: int, request: int, text: str) -> None:
        session = self._sessions.by_number.get(number)
        if session is not None:
            self._outbox.send(session, Resized(request, self._size.n_bytes, text))
