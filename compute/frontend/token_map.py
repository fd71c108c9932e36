"""The Engram token map: ids whose texts differ by case, accents or blanks share a compressed id.

Built from the model's tokenizer with the tokenizers library's own normalizers; imports no torch. A
GGUF may state the map as well: a wrong one is plausible garbage, so it has to be the one built.
Source: model specification, section 3.2, Token map.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, normalizers

from protocol.errors import ConfigError
from protocol.files.checkpoint import Checkpoint
from protocol.files.model_config import ModelConfig

from .gguf_tokenizer import KEY, gguf_vocabulary

TOKENIZER_NAME = "tokenizer.json"
MAP_NAME = "engram_token_map.json"
TOKENS_KEY = KEY + "tokens"
_REPLACEMENT = "\ufffd"
_LONE_SPACE = "\ue000"


def token_map_of(checkpoint: Checkpoint) -> NDArray[np.int64]:
    """Return the token map [vocab_size] of a model; raises ConfigError.

    Of a GGUF it is built from a tokenizer.json beside it or from its own tokens and compared with
    the map in its metadata, where that is there; without any tokens the map stands alone.
    """
    if checkpoint.gguf is None:
        return load_token_map(checkpoint.directory, checkpoint.config)
    index, stored = checkpoint.gguf.index, checkpoint.gguf.model.engram.token_map
    config, path = checkpoint.config, checkpoint.directory / TOKENIZER_NAME
    if path.is_file():
        tokenizer = load_raw_tokenizer(path)
    elif TOKENS_KEY in index.metadata or stored is None:
        path, tokenizer = index.shards[0].path, gguf_vocabulary(index)
    else:
        return stored
    token_map = build_token_map(tokenizer, config.vocab_size)
    if stored is not None and not np.array_equal(stored, token_map):
        token = int(np.flatnonzero(stored != token_map)[0])
        raise ConfigError(
            f"{index.shards[0].path}: the token map in its metadata gives id {token} the "
            f"compressed id {stored[token]}, the tokens of {path.name} give {token_map[token]}"
        )
    _check_count(path, token_map, config)
    return token_map


def load_token_map(directory: Path, config: ModelConfig) -> NDArray[np.int64]:
    """Return the token map [vocab_size] of a model directory, of tokenizer.json where it has one.

    Raises ConfigError where neither that file nor engram_token_map.json is usable, and where the
    number of compressed ids is not the config's: the hash multipliers depend on it.
    """
    path = directory / TOKENIZER_NAME
    if path.exists():
        token_map = build_token_map(load_raw_tokenizer(path), config.vocab_size)
    else:
        path = directory / MAP_NAME
        token_map = _read_map(path, config.vocab_size)
    _check_count(path, token_map, config)
    return token_map


def load_raw_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json; raises ConfigError."""
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{path}: {error}") from error


def build_token_map(tokenizer: Tokenizer, vocab_size: int) -> NDArray[np.int64]:
    """Compressed id of every token id [vocab_size], numbered by first appearance."""
    normalise = _normalizer().normalize_str
    numbers: dict[str, int] = {}
    token_map = np.empty(vocab_size, np.int64)
    for token in range(vocab_size):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if _REPLACEMENT in text:
            key = tokenizer.id_to_token(token) or text  # part of a character: its raw spelling
        else:
            key = normalise(text) or text
        token_map[token] = numbers.setdefault(key, len(numbers))
    return token_map


def _check_count(path: Path, token_map: NDArray[np.int64], config: ModelConfig) -> None:
    n_compressed = int(token_map.max()) + 1
    if config.engram_layers and n_compressed != config.engram_compressed_vocab:
        raise ConfigError(
            f"{path}: gives {n_compressed} compressed ids, engram_compressed_vocab_size is "
            f"{config.engram_compressed_vocab}"
        )


def _normalizer() -> normalizers.Sequence:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )


def _read_map(path: Path, vocab_size: int) -> NDArray[np.int64]:
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{path.parent}: has neither {TOKENIZER_NAME} nor {MAP_NAME}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(raw, list) or not all(type(item) is int and item >= 0 for item in raw):
        raise ConfigError(f"{path}: wanted a list of ids")
    if len(raw) != vocab_size:
        raise ConfigError(f"{path}: has {len(raw)} ids, vocab_size is {vocab_size}")
    return np.array(raw, np.int64)
