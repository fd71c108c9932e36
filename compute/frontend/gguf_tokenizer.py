"""A tokenizer from a GGUF's own metadata: byte-level BPE with the pre-tokenizer that `pre` names.

A wrong pre-tokenizer splits text elsewhere and gives other ids without any error, so a name whose
rule is not known here is refused; a tokenizer.json beside the file is taken instead. Imports no
torch. Source: the GGUF specification, `tokenizer.ggml.*`; the rules are those of the released
tokenizer, which llama.cpp's converter calls `deepseek-v3`, or `joyai-llm` where no BOS is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from protocol.errors import ConfigError
from protocol.files.gguf_index import GgufIndex
from protocol.files.gguf_values import STRING, GgufArray, Value

KEY = "tokenizer.ggml."
CONTROL, USER_DEFINED = 3, 4  # token types; all others are plain vocabulary
_ADVICE = "put the model's tokenizer.json beside the file"
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    (
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
        "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
    ),
)
SPLITS = {"deepseek-v3": _DEEPSEEK, "joyai-llm": _DEEPSEEK}


def gguf_tokenizer(index: GgufIndex) -> Tokenizer:
    """Return the tokenizer of a GGUF; raises ConfigError with what a tokenizer.json would mend."""
    path, metadata = index.shards[0].path, index.metadata
    name = metadata.get(KEY + "pre")
    splits = SPLITS.get(name) if isinstance(name, str) else None
    if splits is None:
        known = " or ".join(map(repr, SPLITS))
        raise _refusal(path, "pre", f"is {ascii(name)[:80]}, wanted {known}")
    backend = gguf_vocabulary(index)
    if KEY + "merges" not in metadata:
        raise _refusal(path, "merges", "is missing, wanted the merges of a BPE")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), "isolated") for split in splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend


def gguf_vocabulary(index: GgufIndex) -> Tokenizer:
    """Return a tokenizer that decodes as the GGUF's does: all that a token map needs."""
    path, metadata = index.shards[0].path, index.metadata
    model = metadata.get(KEY + "model")
    if model != "gpt2":
        raise _refusal(path, "model", f"is {ascii(model)[:80]}, wanted 'gpt2', a byte-level BPE")
    tokens = _strings(path, metadata, "tokens")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise _refusal(path, "tokens", "holds a token twice")
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=_merges(path, metadata, vocabulary)))
    backend.decoder = decoders.ByteLevel()
    _add_markers(backend, tokens, _types(path, metadata, len(tokens)))
    return backend


def _add_markers(backend: Tokenizer, tokens: list[str], types: tuple[int, ...]) -> None:
    """Tokens that are found in text before anything else; their ids are those of the vocabulary."""
    backend.add_tokens(
        [
            AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in {CONTROL, USER_DEFINED} and token
        ]
    )


def _merges(
    path: Path, metadata: Mapping[str, Value], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    if KEY + "merges" not in metadata:
        return []
    merges = []
    for text in _strings(path, metadata, "merges"):
        left, _, right = text.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise _refusal(path, "merges", f"holds {ascii(text)[:80]}, wanted two tokens")
        merges.append((left, right))
    return merges


def _types(path: Path, metadata: Mapping[str, Value], n_tokens: int) -> tuple[int, ...]:
    array = metadata.get(KEY + "token_type")
    if not isinstance(array, GgufArray) or array.count != n_tokens:
        raise _refusal(path, "token_type", f"is no list of {n_tokens} integers, one a token")
    return array.integers()


def _strings(path: Path, metadata: Mapping[str, Value], name: str) -> list[str]:
    array = metadata.get(KEY + name)
    if not isinstance(array, GgufArray) or array.element_type != STRING:
        raise _refusal(path, name, "is no list of strings")
    return list(array.strings())


def _refusal(path: Path, name: str, problem: str) -> ConfigError:
    return ConfigError(f"{path}: {KEY}{name} {problem}; {_ADVICE}")
