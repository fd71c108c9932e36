"""How a request wants its tokens drawn: the names differ by API, the meaning does not."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from compute.frontend.config import FrontendConfig
from compute.frontend.http.errors import ApiError
from protocol.wire.messages import Settings

from .fields import Fields, wrong

MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
_MAX_TOKENS = 1 << 30
_SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class Draw:
    """Settings of the draw, checked."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int | None  # None: as many as there is room for
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0

    def settings(self, max_tokens: int, stop_ids: frozenset[int]) -> Settings:
        """Return them as compute reads them; what is as by default is left out."""
        found: Settings = {
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "seed": self.seed,
            "stop_ids": tuple(sorted(stop_ids)),
        }
        if self.logprobs:
            found |= {"logprobs": 1, "top_logprobs": self.top_logprobs}
        if self.frequency_penalty or self.presence_penalty:
            found["frequency_penalty"] = self.frequency_penalty
            found["presence_penalty"] = self.presence_penalty
        if self.bias:
            found["bias_ids"] = tuple(token_id for token_id, _ in self.bias)
            found["bias"] = tuple(bias for _, bias in self.bias)
        return found


def read_draw(
    fields: Fields,
    config: FrontendConfig,
    *,
    limits: tuple[str, ...],
    logprobs: bool = False,
    top_logprobs: int = 0,
    default_tokens: int | None = None,
) -> Draw:
    """Return the draw that a request asks for. Raises ApiError.

    limits           the fields that may hold the most new tokens, the first that is there counts
    default_tokens   the most new tokens where no field says; None: the context
    """
    given = [fields.integer(name, 1, _MAX_TOKENS) for name in limits]
    max_tokens = next((value for value in given if value is not None), default_tokens)
    seed = fields.integer("seed", -(1 << 63), (1 << 64) - 1)
    return Draw(
        temperature=fields.number("temperature", 0, 2, config.temperature),
        top_p=_top_p(fields, config),
        top_k=_top_k(fields, config),
        min_p=fields.number("min_p", 0, 1, config.min_p),
        seed=secrets.randbits(_SEED_BITS) if seed is None else seed % (1 << _SEED_BITS),
        max_tokens=max_tokens,
        frequency_penalty=fields.number("frequency_penalty", -2, 2, 0.0),
        presence_penalty=fields.number("presence_penalty", -2, 2, 0.0),
        bias=_bias(fields),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
    )


def read_top_logprobs(fields: Fields) -> int:
    """Return how many likeliest tokens a request wants of each place."""
    return fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS) or 0


def _top_p(fields: Fields, config: FrontendConfig) -> float:
    """Some clients write 0 and mean the likeliest token alone."""
    return max(fields.number("top_p", 0, 1, config.top_p), 1e-9)


def _top_k(fields: Fields, config: FrontendConfig) -> int:
    """Some clients write -1 and mean all."""
    value = fields.integer("top_k", -1, 1 << 31)
    return config.top_k if value is None else max(value, 0)


def _bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    found = fields.mapping("logit_bias")
    if len(found) > MAX_BIASES:
        raise ApiError(400, f"logit_bias: at most {MAX_BIASES} are taken", param="logit_bias")
    biases = []
    for name, value in found.items():
        if not name.isdecimal() or len(name) > 9:
            raise wrong("logit_bias", name, "token ids as names")
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not -100 <= value <= 100
        ):
            raise wrong("logit_bias", value, "-100 to 100")
        biases.append((int(name), float(value)))
    return tuple(biases)
