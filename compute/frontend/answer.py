"""One answer as it comes: compute's tokens in, what they turn out to be out, and what it cost.

Invariants: an answer that is left is cancelled in compute; the text does not depend on how tokens
arrive; tokens that come after a stop string are neither shown nor counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from protocol.errors import HeadraceError
from protocol.wire.messages import Done, Progress, Queued, Tokens, Values

from .compute_link import ComputeLost, Generation
from .encoding import Event, Finished, Prompt, Start
from .encoding.events import TextDelta
from .http.errors import ApiError, ended_badly
from .text_stream import TextStream
from .tokenizer import Tokenizer

_IO = ("hits", "misses", "bytes_read", "stall_ms", "copy_ms")
_TIER = "hits_"  # before the name of a tier of memory
_SETTLE_S = 1.0


class Parser(Protocol):
    """What makes events of tokens."""

    @property
    def stopped(self) -> bool:
        """Whether the answer is over."""

    def add(self, token_id: int) -> list[Event]:
        """Return the events of one token."""

    def finish(self, *, cut: bool = False) -> list[Event]:
        """Return the last events, Finished among them."""


class PlainParser:
    """The parser of a completion: all is text."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._text = TextStream(tokenizer, stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended it."""
        return self._text.stopped

    def add(self, token_id: int) -> list[Event]:
        """Return the text of one token."""
        return _text_events(self._text.add(token_id))

    def finish(self, *, cut: bool = False) -> list[Event]:
        """Return what was held back, and Finished."""
        stop = self._text.stop
        rest = "" if self.stopped else self._text.finish()
        reason = "length" if cut and not self.stopped else "stop"
        return [*_text_events(rest), Finished(reason, stop)]


def _text_events(text: str) -> list[Event]:
    return [TextDelta(text)] if text else []


@dataclass(frozen=True, slots=True)
class TokenChance:
    """A token of the answer with its log-probability, and the likeliest of its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Moved:
    """The request waits at this place of the queue; 0: it runs."""

    position: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of the answer; the last piece ends with Finished."""

    events: list[Event]
    chances: list[TokenChance] = field(default_factory=list)


@dataclass(slots=True)
class Usage:
    """What an answer cost so far."""

    n_prompt: int
    n_cached: int = 0
    n_new: int = 0  # the end token and reasoning included
    n_reasoning: int = 0
    prompt_ms: float = 0.0  # making the prompt, in the frontend
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    io: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_IO, 0))
    tiers: dict[str, int] = field(default_factory=dict)  # hits by the tier of memory

    def add(self, told: Tokens) -> None:
        """Count what Tokens says of reads."""
        for name in _IO:
            self.io[name] += float(told.io.get(name, 0))
        for name, hits in _tiers(told.io).items():
            self.tiers[name] = self.tiers.get(name, 0) + hits

    def settle(self, done: Done) -> None:
        """Take compute's own figures, which are whole."""
        usage = done.usage
        self.n_cached = int(usage.get("n_cached", 0))
        self.queue_ms = float(usage.get("queue_ms", self.queue_ms))
        self.prefill_ms = float(usage.get("prefill_ms", self.prefill_ms))
        self.decode_ms = float(usage.get("decode_ms", self.decode_ms))
        for name in _IO:
            self.io[name] = float(usage.get(name, self.io[name]))
        self.tiers |= _tiers(usage)

    @property
    def prefill_per_second(self) -> float:
        """Prompt tokens computed a second."""
        n_computed = self.n_prompt - self.n_cached
        return 1000 * n_computed / self.prefill_ms if self.prefill_ms > 0 else 0.0

    @property
    def decode_per_second(self) -> float:
        """New tokens a second; the first one belongs to the prefill."""
        several = self.n_new > 1 and self.decode_ms > 0
        return 1000 * (self.n_new - 1) / self.decode_ms if several else 0.0


def _tiers(values: Values) -> dict[str, int]:
    return {
        name.removeprefix(_TIER): int(value)
        for name, value in values.items()
        if name.startswith(_TIER)
    }


class Answer:
    """The answer to one request that compute has taken.

    steps   to be iterated once, and closed
    """

    def __init__(
        self,
        generation: Generation,
        queued: Queued,
        prompt: Prompt,
        parser: Parser,
        think_ids: tuple[int | None, int | None],
        hidden_ids: frozenset[int],
    ) -> None:
        self.position = queued.position
        self.usage = Usage(len(prompt.ids))
        self.finished: Finished | None = None
        self.progress: Progress | None = None  # of the prompt
        self.arrived = time.monotonic()
        self.first_token: float | None = None
        self._generation = generation
        self._parser = parser
        self._think, self._think_end = think_ids
        self._hidden_ids = hidden_ids
        self._reasons = prompt.start in (Start.REASONING, Start.REASONING_CONTINUED)
        self._may_think = prompt.start is Start.TEXT

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self._generation.cancel()

    async def steps(self) -> AsyncGenerator[Moved | Piece, None]:
        """Yield what happens; the last is a Piece that ends with Finished.

        Raises ApiError where compute fails.
        """
        try:
            while self.finished is None:
                told = await self._next()
                if isinstance(told, Queued):
                    self.position = told.position
                    yield Moved(told.position)
                elif isinstance(told, Progress):
                    self._runs(told)
                elif isinstance(told, Tokens):
                    piece = self._piece(told)
                    if piece.events or piece.chances:
                        yield piece
                    if self._parser.stopped and told.ids[-1] not in self._hidden_ids:
                        yield await self._stopped()
                else:
                    yield self._last(told)
        finally:
            self._generation.cancel()

    async def _next(self) -> Queued | Progress | Tokens | Done:
        told = await self._generation.next()
        if isinstance(told, Tokens):
            now = time.monotonic()
            if self.first_token is None:
                self.first_token = now
                since_arrival = 1000 * (now - self.arrived)
                self.usage.prefill_ms = since_arrival - self.usage.queue_ms
            self.usage.decode_ms = 1000 * (now - self.first_token)
        return told

    def _runs(self, told: Progress) -> None:
        if self.progress is None:
            self.usage.queue_ms = 1000 * (time.monotonic() - self.arrived)
        self.position, self.progress = 0, told

    async def _stopped(self) -> Piece:
        """The last piece of an answer that a stop string ends: compute need not go on.

        Its own figures are waited for; where they do not come soon, ours stand.
        """
        self._generation.stop()
        with contextlib.suppress(TimeoutError, HeadraceError):
            async with asyncio.timeout(_SETTLE_S):
                while not isinstance(told := await self._generation.next(), Done):
                    pass
            self.usage.settle(told)
        piece = Piece([])
        self._finish(piece, cut=False)
        return piece

    def _piece(self, told: Tokens) -> Piece:
        piece = Piece([])
        self.usage.add(told)
        n_top = len(told.top_ids) // len(told.ids) if told.ids else 0
        for place, token_id in enumerate(told.ids):
            if self._parser.stopped:
                break
            self._count(token_id)
            piece.events.extend(self._parser.add(token_id))
            if told.logprobs and not self._reasons and token_id not in self._hidden_ids:
                span = slice(place * n_top, (place + 1) * n_top)
                top = tuple(zip(told.top_ids[span], told.top_logprobs[span], strict=True))
                piece.chances.append(TokenChance(token_id, told.logprobs[place], top))
        return piece

    def _count(self, token_id: int) -> None:
        self.usage.n_new += 1
        if self._may_think and token_id == self._think:
            self._reasons = True
        self._may_think = False
        if self._reasons:
            self.usage.n_reasoning += 1
        if token_id == self._think_end:
            self._reasons = False

    def _last(self, done: Done) -> Piece:
        self.usage.settle(done)
        if done.reason == "error":
            usage = done.usage
            raise ended_badly(str(usage.get("fault", "")), str(usage.get("text", "")))
        if done.reason == "deadline":
            raise ApiError(504, "the request took longer than this server allows")
        if done.reason == "cancelled":
            raise ComputeLost("compute is ending")
        piece = Piece([])
        self._finish(piece, cut=done.reason == "length")
        return piece

    def _finish(self, piece: Piece, *, cut: bool) -> None:
        piece.events.extend(self._parser.finish(cut=cut))
        last = piece.events[-1]
        assert isinstance(last, Finished)
        self.finished = last
