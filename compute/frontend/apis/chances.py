"""Log-probabilities of tokens, as each API writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compute.frontend.answer import TokenChance
from compute.frontend.tokenizer import Tokenizer


def chat_chances(chances: Sequence[TokenChance], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the entries of Chat Completions and Responses."""
    return [
        _entry(chance.token_id, chance.logprob, tokenizer)
        | {"top_logprobs": [_entry(*pair, tokenizer) for pair in chance.top]}
        for chance in chances
    ]


def completion_chances(
    chances: Sequence[TokenChance], tokenizer: Tokenizer, offset: int
) -> dict[str, Any]:
    """Return the four lists of Completions.

    offset   characters of the text before these tokens
    """
    tokens = [_spelled(chance.token_id, tokenizer)[0] for chance in chances]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [chance.logprob for chance in chances],
        "top_logprobs": [
            {_spelled(token_id, tokenizer)[0]: logprob for token_id, logprob in chance.top}
            for chance in chances
        ],
        "text_offset": offsets,
    }


def _entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    text, spelling = _spelled(token_id, tokenizer)
    return {"token": text, "logprob": logprob, "bytes": list(spelling)}


def _spelled(token_id: int, tokenizer: Tokenizer) -> tuple[str, bytes]:
    spelling = tokenizer.spelling(token_id)
    return spelling.decode("utf-8", "replace"), spelling
