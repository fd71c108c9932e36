"""Runs the requests of a benchmark, each on text that none before it had.

Every cold run has a daemon of its own, in a private directory, that has read nothing and knows no
hot list; the warm runs share another one.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from compute.config import ComputeConfig
from protocol.errors import ConfigError

from .report import BenchRun

if TYPE_CHECKING:
    from compute.commands.opening import Opened

CHARACTERS = 8  # of text cut for each token that is wanted


@dataclass(frozen=True, slots=True)
class Settings:
    """How much is measured."""

    prompt_tokens: int
    new_tokens: int
    repeats: int
    warm_ups: int  # requests before the warm runs
    seed: int


class Texts:
    """Pieces of a text, none twice and none touching another, from a place that the seed says."""

    def __init__(self, text: str, settings: Settings) -> None:
        self._size = CHARACTERS * settings.prompt_tokens
        n_pieces = 2 * settings.repeats + settings.warm_ups
        places = range(0, len(text) - self._size + 1, self._size)
        if len(places) < n_pieces:
            raise ConfigError(
                f"the text has {len(text)} characters, {n_pieces} prompts of "
                f"{settings.prompt_tokens} tokens want {n_pieces * self._size}: give --text FILE, "
                "fewer --repeats or shorter prompts"
            )
        self._text = text
        self._places = random.Random(settings.seed).sample(places, n_pieces)

    def take(self, ready: Opened, n_tokens: int) -> list[int]:
        """Return the ids of the next piece. Raises ConfigError where it is too short."""
        place = self._places.pop()
        ids = [
            ready.bos_id,
            *ready.tokenizer.encode(self._text[place : place + self._size]),
        ][:n_tokens]
        if len(ids) < n_tokens:
            raise ConfigError(f"a piece of the text has {len(ids)} tokens, wanted {n_tokens}")
        return ids


def run_all(
    config: ComputeConfig, settings: Settings, text: str, told: Callable[[BenchRun], None]
) -> Iterator[BenchRun]:
    """Yield the cold runs, the warm ones, and the resident one where nothing was read for it."""
    texts = Texts(text, settings)
    for _ in range(settings.repeats):
        with _fresh(config) as ready:
            run = _run(ready, "cold", texts.take(ready, settings.prompt_tokens), settings)
        told(run)
        yield run
    with _fresh(config) as ready:
        ids: list[int] = []
        for number in range(settings.warm_ups + settings.repeats):
            ids = texts.take(ready, settings.prompt_tokens)
            run = _run(ready, "warm", ids, settings)
            if number >= settings.warm_ups:
                told(run)
                yield run
        run = _run(ready, "resident", ids, settings)
        if not run.misses and not run.prompt_misses:
            told(run)
            yield run


@contextmanager
def _fresh(config: ComputeConfig) -> Iterator[Opened]:
    """An engine on a daemon that has read nothing."""
    from compute.commands.opening import opened
    from compute.commands.terminal import Display

    with tempfile.TemporaryDirectory(prefix="hr-bench-") as folder:
        own = replace(config, runtime_dir=Path(folder), state_dir=Path(folder) / "state")
        with opened(own, Display(quiet=True)) as ready:
            yield ready


def _run(ready: Opened, kind: str, ids: list[int], settings: Settings) -> BenchRun:
    from compute.sampler import Sampling
    from compute.session import Finished, NewToken, Request

    source = ready.engine.source
    begin = first = source.io.copy()
    request = Request(ids, Sampling(temperature=0.0), settings.new_tokens)
    n_tokens, last = 0, None
    for event in ready.engine.generate(request):
        if isinstance(event, NewToken):
            n_tokens += 1
            if n_tokens == 1:
                first = source.io.copy()
        last = event
    assert isinstance(last, Finished)
    io = source.io.since(first)
    return BenchRun(
        kind=kind,
        prompt_tokens=last.n_prompt,
        new_tokens=last.n_new,
        first_token_s=last.prefill_s,
        prefill_tokens_per_second=last.prefill_per_second,
        decode_tokens_per_second=last.tokens_per_second,
        hits=io.hits,
        misses=io.misses,
        bytes_read=io.bytes_read,
        stall_ms=io.stall_ms,
        prompt_misses=first.since(begin).misses,
    )
