"""What a Generate asks of the sampler, read from its settings and checked.

The settings are PROTOCOL.md's, section 9. An unknown name, a wrong type or a value out of range is
a ConfigError that names it: frontend and compute are of different versions then, or the frontend
did not check its client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compute.grammar import Grammars
from compute.logit_rules import LogitRules
from compute.sampler import Sampling
from protocol.errors import ConfigError
from protocol.wire.messages import Generate

_NUMBERS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty")
_INTEGERS = ("max_tokens", "top_k", "seed", "logprobs", "top_logprobs", "grammar_after")
_LISTS = ("stop_ids", "bias_ids", "bias")


@dataclass(frozen=True, slots=True)
class Wishes:
    """How one request is to be sampled."""

    sampling: Sampling
    max_tokens: int | None  # None: as many as there is room for
    stop_ids: frozenset[int]
    logprobs: bool
    bias: Mapping[int, float]
    frequency: float
    presence: float
    grammar: str  # empty: none
    grammar_after: int | None

    def rules(self, grammars: Grammars) -> LogitRules | None:
        """Return the rules of the draw at their start, None for a plain draw.

        May take a second where the grammar is large. Raises ConfigError where it is none.
        """
        if not (self.grammar or self.bias or self.frequency or self.presence):
            return None
        grammar = grammars.start(self.grammar, self.grammar_after) if self.grammar else None
        return LogitRules(
            bias=self.bias, frequency=self.frequency, presence=self.presence, grammar=grammar
        )


def read_wishes(message: Generate, vocab_size: int) -> Wishes:
    """Return what a Generate asks for. Raises ConfigError."""
    settings = _checked(message.sampling)
    sampling = Sampling(
        temperature=float(settings.get("temperature", 1.0)),
        top_p=float(settings.get("top_p", 1.0)),
        top_k=settings.get("top_k", 0),
        min_p=float(settings.get("min_p", 0.0)),
        seed=settings.get("seed", 0),
        top_logprobs=settings.get("top_logprobs", 0),
    )
    max_tokens = settings.get("max_tokens")
    if max_tokens is not None and max_tokens < 0:
        raise ConfigError(f"max_tokens is {max_tokens}, wanted 0 or more")
    try:
        grammar = message.grammar.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"grammar: {error}") from None
    return Wishes(
        sampling=sampling,
        max_tokens=max_tokens,
        stop_ids=frozenset(settings.get("stop_ids", ())),
        logprobs=bool(settings.get("logprobs", 0)) or sampling.top_logprobs > 0,
        bias=_bias(settings, vocab_size),
        frequency=float(settings.get("frequency_penalty", 0.0)),
        presence=float(settings.get("presence_penalty", 0.0)),
        grammar=grammar,
        grammar_after=settings.get("grammar_after"),
    )


def _bias(settings: Mapping[str, Any], vocab_size: int) -> dict[int, float]:
    ids, values = settings.get("bias_ids", ()), settings.get("bias", ())
    if len(ids) != len(values):
        raise ConfigError(f"bias_ids has {len(ids)} entries, bias {len(values)}")
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise ConfigError(f"bias_ids: {token_id} is outside the vocabulary of {vocab_size}")
    return dict(zip(ids, map(float, values), strict=True))


def _checked(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, value in settings.items():
        if name in _NUMBERS:
            fits = isinstance(value, int | float)
        elif name in _INTEGERS:
            fits = isinstance(value, int)
        elif name in _LISTS:
            integers = name != "bias"
            fits = isinstance(value, tuple) and (
                not integers or all(isinstance(item, int) for item in value)
            )
        else:
            known = ", ".join((*_INTEGERS, *_NUMBERS, *_LISTS))
            raise ConfigError(f"setting {name!r} is not known; known are {known}")
        if not fits:
            raise ConfigError(f"setting {name!r}: {value!r} is of the wrong type")
    return settings
