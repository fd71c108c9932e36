"""A tokenizer.json as the metadata that llama.cpp's converter makes of it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.fake_gguf import Typed

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


def token_metadata(path: Path, *, pre: str = "deepseek-v3", n_tokens: int = 0) -> dict[str, Typed]:
    """Return `tokenizer.ggml.*`; ids up to `n_tokens` that have no token are padded as unused."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    tokens = dict(raw["model"]["vocab"])
    added = {token["content"]: token for token in raw["added_tokens"]}
    tokens |= {text: token["id"] for text, token in added.items()}
    n_tokens = max(n_tokens, max(tokens.values()) + 1)
    texts = [f"[PAD{number}]" for number in range(n_tokens)]
    types = [UNUSED] * n_tokens
    for text, number in tokens.items():
        texts[number] = text
        types[number] = NORMAL if text not in added else _type_of(added[text])
    merges = [" ".join(m) if isinstance(m, list) else m for m in raw["model"]["merges"]]
    return {
        "tokenizer.ggml.model": Typed("string", "gpt2"),
        "tokenizer.ggml.pre": Typed("string", pre),
        "tokenizer.ggml.tokens": Typed("array:string", texts),
        "tokenizer.ggml.token_type": Typed("array:i32", types),
        "tokenizer.ggml.merges": Typed("array:string", merges),
    }


def _type_of(token: dict[str, object]) -> int:
    return CONTROL if token["special"] else USER_DEFINED
