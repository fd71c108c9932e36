"""One model, one sequence at a time: a prompt goes in, events with tokens and text come out.

Owns the sequence of the running request. Invariants: the ids depend on the prompt, the sampling
and the model alone, never on timing, arena size or a daemon's restart; a request that fails or is
cancelled leaves the engine ready for the next one. One thread uses it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from compute.model.model import Model
from compute.model.sequence import Sequence as ModelSequence
from protocol.errors import ConfigError

from .experts.miss_client import IoCounters, MissClient, RequestCancelled
from .frontend.text_stream import TextStream
from .logit_rules import LogitRules
from .prefix.cache import PrefixCache, Trail
from .sampler import Choice, Sampling, choose


@dataclass(frozen=True, slots=True)
class Request:
    """What is wanted of one generation."""

    prompt_ids: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 256
    stop_ids: frozenset[int] = frozenset()
    text: TextStream | None = None  # decodes the ids and watches for stop strings
    logprobs: bool = False
    rules: LogitRules | None = None  # of this request alone: they move with its ids
    cancelled: Callable[[], bool] = lambda: False  # asked before each window and each layer


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A chunk of the prompt has been computed."""

    n_done: int
    n_prompt: int
    seconds: float  # since the request began


@dataclass(frozen=True, slots=True)
class NewToken:
    """The next id, and the text that it lets out."""

    choice: Choice
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request."""

    reason: str  # "stop", "length", "cancelled"
    text: str  # what was still held back
    n_prompt: int
    n_new: int
    prefill_s: float
    decode_s: float  # from the first new id to the last
    io: IoCounters
    n_cached: int = 0  # of the prompt, taken over from earlier requests
    n_computed: int = 0  # of the prompt, by this request: less than the rest if it was cut short

    @property
    def prefill_per_second(self) -> float:
        """Prompt tokens computed a second."""
        return self.n_computed / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second; the first one belongs to the prefill."""
        return (self.n_new - 1) / self.decode_s if self.n_new > 1 and self.decode_s > 0 else 0.0


class NextLogits(Protocol):
    """What a decoding leaves on its device; valid until its next step."""

    def likeliest(self) -> int:
        """Return the id of the largest logit. Raises ShardError on a NaN."""
        ...

    def drawn(self) -> int:
        """Return the id that the step drew, where it was to. Raises ShardError on a NaN."""
        ...

    def values(self) -> NDArray[np.float32]:
        """Return the logits [vocab] f32."""
        ...


class Decoding(Protocol):
    """Takes new ids in by launches on a device; owns the one sequence that it does so with."""

    def new_sequence(self) -> ModelSequence:
        """Return the sequence, empty; who had it before has it no more."""
        ...

    def takes(self, sequence: ModelSequence) -> bool:
        """Whether this is the sequence."""
        ...

    def expect(self, token: int) -> None:
        """Ask early for what `step` with this id needs; nothing of the sequence changes."""
        ...

    def values(self) -> dict[str, int | str]:
        """Return counts by name, for reports."""
        ...

    def step(self, token: int, sampling: Sampling | None = None) -> NextLogits:
        """Take one id into the sequence, and draw the next one where a sampling is given.

        Drawn is what `choose` chooses of the same logits. Raises as `Model.forward` does.
        """
        ...

    def finish(self) -> None:
        """End a request: nothing of it is left to be said."""
        ...


Event = Prefilled | NewToken | Finished
Logits = NDArray[np.float32] | NextLogits  # [vocab]


class Engine:
    """Generates with one model over one expert source.

    context   most tokens of a sequence, prompt included
    chunk     prompt tokens of one forward; the cuts are at its multiples
    prefixes  states of earlier requests to go on from; None: every request begins at 0
    decoding  how new ids are taken in by launches on a device; None: as prompts are
    """

    def __init__(
        self,
        model: Model,
        source: MissClient,
        *,
        context: int,
        chunk: int,
        prefixes: PrefixCache | None = None,
        decoding: Decoding | None = None,
    ) -> None:
        self.model = model
        self.source = source
        self.context = context
        self.chunk = chunk
        self.prefixes = prefixes
        self.decoding = decoding

    def check(self, ids: Sequence[int], what: str = "prompt") -> None:
        """Raise ConfigError for ids that the model cannot take: none, too many, unknown ones."""
        vocab = self.model.config.vocab_size
        if not ids:
            raise ConfigError(f"{what} is empty: at least one token is needed")
        if len(ids) > self.context:
            raise ConfigError(f"{what} has {len(ids)} tokens, the context {self.context}")
        for place, token_id in enumerate(ids):
            if not 0 <= token_id < vocab:
                raise ConfigError(
                    f"{what}: id {token_id} at place {place} is outside the vocabulary of {vocab}"
                )

    def generate(self, request: Request) -> Iterator[Event]:
        """Yield Prefilled for each chunk, NewToken for each id, Finished at the end.

        The end may be a stop id (the last NewToken, without text), a stop string, the rules that
        allow no more, `max_tokens` or the context's end ("length"), or `cancelled`.
        Raises ConfigError before any work, ShardError and DaemonLost as the source does.
        """
        self.check(request.prompt_ids)
        return _Run(self, request).events()

    def logits(
        self, sequence: ModelSequence, ids: Sequence[int], *, every: bool = False
    ) -> NDArray[np.float32]:
        """Feed `ids` to `sequence` as one forward: f32 [vocab], or [n, vocab] where every is asked.

        The picks are reported and the daemon's changes taken when it is done.
        """
        self.source.begin_step()
        with torch.inference_mode():
            logits = self.model.forward(
                sequence, ids, self.source, self.source, logits="all" if every else "last"
            )
        self.source.end_step()
        rows: NDArray[np.float32] = logits.cpu().numpy()
        return rows if every else rows[-1]

    def new_sequence(self) -> ModelSequence:
        """Return an empty sequence of the engine's context; with `decoding` the only one."""
        if self.decoding is not None:
            return self.decoding.new_sequence()
        return self.model.new_sequence(self.context)


class _Run:
    """One request from its prompt to its end."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine = engine
        self._request = request
        self._io_before = engine.source.io.copy()
        self._started = time.perf_counter()
        self._first = self._last = 0.0
        self._n_new = self._n_cached = self._n_computed = 0
        self._trail: Trail | None = None
        room = engine.context - len(request.prompt_ids)
        self._most = min(request.max_tokens, room)
        # What a decoding draws with by itself: nothing where an id is likeliest or the host's.
        plain = request.rules is None and not request.logprobs
        is_drawn = plain and request.sampling.temperature != 0
        self._sampling = request.sampling if is_drawn else None

    def events(self) -> Iterator[Event]:
        source = self._engine.source
        before, source.waiting.cancelled = source.waiting.cancelled, self._request.cancelled
        try:
            reason = yield from self._tokens()
            self._keep()
        except RequestCancelled:
            reason = "cancelled"
        finally:
            source.waiting.cancelled = before
            if self._trail is not None:
                self._trail.close()
            if self._engine.decoding is not None:
                self._engine.decoding.finish()
        yield self._finished(reason)

    def _tokens(self) -> Generator[Event, None, str]:
        request, engine = self._request, self._engine
        if self._most <= 0:
            return "length"
        sequence = self._begin()
        logits: Logits = yield from self._prefill(sequence)
        while True:
            engine.source.check_cancelled()
            choice = self._chosen(logits, sequence.position)
            self._note()
            if choice.id in request.stop_ids:
                yield NewToken(choice, "")
                return "stop"
            text = self._text_of(choice.id)
            reason = self._end()
            if not reason:
                self._expect(sequence, choice.id)  # before anybody is told: it takes a read
            yield NewToken(choice, text)
            if reason:
                return reason
            if self._n_new == 1:
                self._keep()  # the prompt's end: the first token need not wait for it
            logits = self._next(sequence, choice.id)

    def _begin(self) -> ModelSequence:
        """Return a sequence at the longest prefix of the prompt that is known."""
        sequence, prefixes = self._engine.new_sequence(), self._engine.prefixes
        if prefixes is not None:
            self._trail = prefixes.resume(sequence, self._request.prompt_ids)
            self._n_cached = self._trail.n_cached
        return sequence

    def _prefill(self, sequence: ModelSequence) -> Generator[Event, None, NDArray[np.float32]]:
        """Take the rest of the prompt, cut at the multiples of the chunk wherever it begins."""
        ids, chunk = self._request.prompt_ids, self._engine.chunk
        while sequence.position < len(ids):
            start = sequence.position
            part = ids[start : (start // chunk + 1) * chunk]
            logits = self._take(sequence, part)
            self._n_computed += len(part)
            yield Prefilled(start + len(part), len(ids), time.perf_counter() - self._started)
        return logits

    def _expect(self, sequence: ModelSequence, token: int) -> None:
        decoding = self._engine.decoding
        if decoding is not None and decoding.takes(sequence):
            decoding.expect(token)

    def _next(self, sequence: ModelSequence, token: int) -> Logits:
        """Take a new id in: by launches where the engine decodes so."""
        decoding = self._engine.decoding
        if decoding is None or not decoding.takes(sequence):
            return self._take(sequence, [token])
        logits = decoding.step(token, self._sampling)
        self._note_taken(sequence, [token])
        return logits

    def _take(self, sequence: ModelSequence, ids: Sequence[int]) -> NDArray[np.float32]:
        logits = self._engine.logits(sequence, ids)
        self._note_taken(sequence, ids)
        return logits

    def _note_taken(self, sequence: ModelSequence, ids: Sequence[int]) -> None:
        if self._trail is not None:
            self._trail.took(ids)
            if sequence.position % self._engine.chunk == 0:
                self._trail.keep()

    def _keep(self) -> None:
        if self._trail is not None:
            self._trail.keep()

    def _chosen(self, logits: Logits, position: int) -> Choice:
        request, rules = self._request, self._request.rules
        if not isinstance(logits, np.ndarray):
            if self._sampling is not None:
                return Choice(logits.drawn())
            if rules is None and not request.logprobs:
                return Choice(logits.likeliest())
            logits = logits.values()
        choice = choose(
            logits,
            position,
            request.sampling,
            ruled=None if rules is None else rules.applied(logits),
            logprobs=request.logprobs,
        )
        if rules is not None:
            rules.commit(choice.id)
        return choice

    def _end(self) -> str:
        """Return why the last id was the last one, "" where it was not."""
        text, rules = self._request.text, self._request.rules
        if (text is not None and text.stopped) or (rules is not None and rules.ended):
            return "stop"
        return "length" if self._n_new >= self._most else ""

    def _note(self) -> None:
        self._n_new += 1
        self._last = time.perf_counter()
        self._first = self._first or self._last

    def _text_of(self, token_id: int) -> str:
        text = self._request.text
        return "" if text is None else text.add(token_id)

    def _finished(self, reason: str) -> Finished:
        text = self._request.text
        now = time.perf_counter()
        return Finished(
            reason=reason,
            text="" if text is None or text.stopped else text.finish(),
            n_prompt=len(self._request.prompt_ids),
            n_new=self._n_new,
            prefill_s=(self._first or now) - self._started,
            decode_s=self._last - self._first,
            io=self._engine.source.io.since(self._io_before),
            n_cached=self._n_cached,
            n_computed=self._n_computed,
        )
