"""Grammars over the output: which ids may come next, as masks on the logits.

The library is llguidance: it depends on nothing else and has wheels for x86-64 and Arm, so that the
frontend, which has no torch, can check a grammar with it before anything is queued; and it works
out each mask when it is asked for. xgrammar needs torch and compiles a grammar beforehand. A
grammar comes from the frontend in the library's own text form; here it meets the vocabulary.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ConfigError
from protocol.wording import to_install

MISSING = f"grammars need the package llguidance: {to_install('serve')}"


class Grammars:
    """Makes the grammars of one model; reads its tokenizer when the first one is asked for."""

    def __init__(self, tokenizer: Path | Callable[[], str], vocab_size: int, end_id: int) -> None:
        """Take a tokenizer.json, or what gives the text of one."""
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._end_id = end_id

    def start(self, text: str, after: int | None = None) -> Grammar:
        """Return a grammar at its start. Raises ConfigError where the text is none.

        after   the id behind which it begins to bind; None: at once
        """
        limits = self._library.LLParserLimits(verbose_errors=False)
        matcher = self._library.LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise ConfigError(f"grammar: {matcher.get_error()}")
        return Grammar(matcher, after)

    @cached_property
    def _library(self) -> Any:
        try:
            return importlib.import_module("llguidance")
        except ImportError:
            raise ConfigError(MISSING) from None

    @cached_property
    def _tokenizer(self) -> Any:
        source = self._source
        text = str(source) if isinstance(source, Path) else source()
        try:
            return self._library.LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._end_id)
        except (ValueError, RuntimeError) as error:
            where = source if isinstance(source, Path) else "the model's tokenizer"
            raise ConfigError(f"{where}: no grammar can use it: {error}") from error


class Grammar:
    """One grammar in the middle of one output."""

    def __init__(self, matcher: Any, after: int | None) -> None:
        self._matcher = matcher
        self._after = after

    @property
    def ended(self) -> bool:
        """Whether the output is complete and nothing but the end can follow."""
        return self._after is None and bool(self._matcher.is_stopped())

    def forbid(self, logits: NDArray[np.float32]) -> None:
        """Set the logits [vocab] of all ids that may not come to -inf, in place.

        Raises ConfigError where none may.
        """
        if self._after is not None:
            return
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=len(logits), bitorder="little")
        self._check()
        if not allowed.any():
            raise ConfigError("grammar: no token of the model can follow what was written")
        logits[allowed == 0] = -np.inf

    def commit(self, token_id: int) -> None:
        """Go on past an id that was drawn. Raises ConfigError where it may not come."""
        if self._after is not None:
            if token_id == self._after:
                self._after = None
            return
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConfigError(f"grammar: {self._matcher.get_error()}")
