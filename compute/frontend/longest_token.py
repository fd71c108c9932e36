"""How many bytes of a text one token stands for at most, where that can be known.

It can where each byte of a text is a character of a byte-level vocabulary, and nothing of a text is
dropped or replaced before: then the tokens' bytes are the text's, and dividing by the longest gives
a number of tokens that the text has at least.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel


def longest_token(backend: Backend) -> int | None:
    """Return the bytes of the longest token, added ones counted; None where they say nothing."""
    vocabulary = backend.get_vocab(with_added_tokens=False)
    keeps_all = (
        type(backend.model).__name__ == "BPE"
        and backend.truncation is None
        and _does_nothing(_settings(backend.normalizer))
        and _makes_bytes(_settings(backend.pre_tokenizer))
        and all(byte in vocabulary for byte in ByteLevel.alphabet())
    )
    if not keeps_all:
        return None
    added = backend.get_added_tokens_decoder().values()
    # A character of such a vocabulary is a byte.
    return max(*map(len, vocabulary), *(len(token.content.encode()) for token in added), 1)


def _settings(part: Any) -> dict[str, Any]:
    """Return a part of the tokenizer as its file has it, {} for none."""
    settings: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return settings


def _does_nothing(normalizer: dict[str, Any]) -> bool:
    return not normalizer or (
        normalizer["type"] == "Sequence" and all(map(_does_nothing, normalizer["normalizers"]))
    )


def _makes_bytes(part: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer cuts a text and turns it into bytes, dropping nothing."""
    parts = part["pretokenizers"] if part.get("type") == "Sequence" else [part]
    cuts = all(
        one.get("type") in {"ByteLevel", "Digits"}
        or (one.get("type") in {"Split", "Punctuation"} and one["behavior"] != "Removed")
        for one in parts
    )
    return cuts and any(one.get("type") == "ByteLevel" for one in parts)
