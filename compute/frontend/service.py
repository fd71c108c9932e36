"""The frontend's one object: model, prompts, the link to compute, and what it remembers.

Runs on the event loop; prompts are made on a thread of their own, one at a time, so that a long one
does not hold up the streams.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from protocol.files.checkpoint import Checkpoint, open_checkpoint, resolve_model
from protocol.wire.messages import Joined
from protocol.wire.sockets import RuntimePaths

from .answer import Answer, Parser, PlainParser
from .apis.sampling import Draw
from .compute_link import ComputeLink, NotNow, Order
from .config import FrontendConfig
from .constraints import BoundGrammar, grammar_of
from .encoding import Encoding, Prompt
from .followed import Followed
from .http.errors import STOPPING, ApiError
from .metrics import Metrics
from .recent import Recent, Remembered
from .tokenizer import Tokenizer

_LOG = logging.getLogger("headrace.frontend")
SPARE_PREPARING = 16  # prompts being made, beyond what compute lets wait
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that has been read: the prompt, and how to go on from it."""

    prompt: Prompt
    grammar: BoundGrammar
    draw: Draw
    stops: tuple[str, ...]
    plain: bool = False  # a completion: the output is one text
    prompt_ms: float = 0.0  # that making the prompt took


class Frontend:
    """What every endpoint works with."""

    def __init__(self, config: FrontendConfig, paths: RuntimePaths) -> None:
        self.config = config
        self.checkpoint: Checkpoint = open_checkpoint(resolve_model(config.model))
        self.tokenizer = Tokenizer.of(self.checkpoint)
        self.encoding = Encoding(self.tokenizer, config.encoding(), template=config.chat_template)
        self.link = ComputeLink(paths, self.checkpoint.fingerprint)
        self.metrics = Metrics()
        self.name = config.served_name or self.checkpoint.path.absolute().name
        self.fingerprint = "headrace-" + self.checkpoint.fingerprint.hex()[:12]
        self.started = int(time.time())
        self.recent = Recent()
        self.is_draining = False
        self._n_preparing = 0
        self._threads = ThreadPoolExecutor(1, "prompts")
        special = self.tokenizer.special
        end = self.checkpoint.config.eos_id
        self.stop_ids = frozenset({end, end if special.end is None else special.end})
        self._hidden_ids = self.stop_ids | special.present()

    async def off_loop(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Return what a function returns that may take long, run on the prompts' thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(function, *arguments))

    async def asked(
        self,
        make_prompt: Callable[[int], Prompt],
        draw: Draw,
        stops: tuple[str, ...],
        *,
        plain: bool = False,
    ) -> Asked:
        """Make a prompt for the context and check its grammar. Raises RequestError, ApiError."""
        joined = self._joined()
        if self._n_preparing > joined.max_waiting + SPARE_PREPARING:
            raise ApiError(429, "too many prompts at once", code="queue_full", retry_s=1)
        self._check_bias(draw)

        def make() -> tuple[Prompt, BoundGrammar]:
            prompt = make_prompt(joined.context)
            return prompt, grammar_of(prompt, self.tokenizer)

        began = time.monotonic()
        self._n_preparing += 1
        try:
            prompt, grammar = await self.off_loop(make)
        finally:
            self._n_preparing -= 1
        prompt_ms = 1000 * (time.monotonic() - began)
        return Asked(prompt, grammar, draw, stops, plain, prompt_ms)

    async def begin(self, asked: Asked) -> Answer:
        """Hand a request to compute and wait until it is queued.

        Raises ApiError, ComputeRefused, ComputeLost.
        """
        joined = self._joined()
        prompt, draw = asked.prompt, asked.draw
        room = joined.context - len(prompt.ids)
        if room <= 0:
            raise ApiError(
                400,
                f"the prompt has {len(prompt.ids)} tokens; with at least one new token it does not "
                f"fit the context of {joined.context}",
                param="messages",
                code="context_length_exceeded",
            )
        max_tokens = room if draw.max_tokens is None else min(draw.max_tokens, room)
        settings = draw.settings(max_tokens, self.stop_ids)
        if asked.grammar.after is not None:
            settings["grammar_after"] = asked.grammar.after
        order = Order(
            tuple(prompt.ids),
            settings,
            asked.grammar.text,
            deadline_ms=int(1000 * self.config.request_timeout_s),
        )
        generation = self.link.generate(order)
        try:
            queued = await generation.queued()
        except BaseException:
            generation.cancel()
            raise
        special = self.tokenizer.special
        answer = Answer(
            generation,
            queued,
            prompt,
            self._parser(asked),
            (special.think, special.think_end),
            self._hidden_ids,
        )
        answer.usage.prompt_ms = asked.prompt_ms
        return answer

    def followed(self, answer: Answer, number: str, path: str) -> Followed:
        """Return an answer's steps; how they end is remembered and counted."""
        remembered = Remembered(number, path, answer.usage)
        self.recent.add(remembered)

        def ended(how: str) -> None:
            remembered.ended(how)
            self.metrics.ended(how, answer.usage)
            _LOG.info("%s", remembered.line())

        return Followed(answer, ended)

    def end_requests(self) -> None:
        """End what still runs, each request with an error in its API's shape."""
        self.link.end_all(NotNow(STOPPING))

    def close(self) -> None:
        """End the prompts' thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _joined(self) -> Joined:
        """The session with compute. Raises ComputeLost where there is none, or we are ending."""
        if self.is_draining:
            raise NotNow(STOPPING)
        joined = self.link.joined
        if joined is None:
            raise self.link.absence()
        return joined

    def _parser(self, asked: Asked) -> Parser:
        if asked.plain:
            return PlainParser(self.tokenizer, asked.stops)
        return self.encoding.parser(asked.prompt, asked.stops)

    def _check_bias(self, draw: Draw) -> None:
        for token_id, _ in draw.bias:
            if token_id >= self.checkpoint.config.vocab_size:
                raise ApiError(400, f"logit_bias: there is no token {token_id}", param="logit_bias")


def new_id(prefix: str) -> str:
    """Return an id that nobody has seen."""
    return prefix + secrets.token_hex(12)
