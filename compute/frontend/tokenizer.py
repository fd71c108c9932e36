"""Text to token ids and back, from a tokenizer.json or a GGUF's metadata. Imports no torch.

Invariants: an incremental decoder never lets half a character out, and the joined pieces are the
text of all ids at once; ids of the special tokens are looked up by their text, never assumed.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from protocol.errors import ConfigError
from protocol.files.checkpoint import Checkpoint

from .gguf_tokenizer import gguf_tokenizer
from .longest_token import longest_token
from .token_map import TOKENIZER_NAME


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Ids of the markers that this tokenizer has; None where it lacks one."""

    begin: int | None
    end: int | None
    pad: int | None
    user: int | None
    assistant: int | None
    system: int | None
    latest_reminder: int | None
    think: int | None
    think_end: int | None
    dsml: int | None
    image: int | None

    def present(self) -> frozenset[int]:
        """The ids that exist."""
        values = (getattr(self, field.name) for field in fields(self))
        return frozenset(value for value in values if value is not None)


# The bar is U+FF5C and the low block U+2581, as in the released tokenizer.
_MARKERS = {
    "begin": "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "end": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "pad": "<\uff5c\u2581pad\u2581\uff5c>",
    "user": "<\uff5cUser\uff5c>",
    "assistant": "<\uff5cAssistant\uff5c>",
    "system": "<\uff5cSystem\uff5c>",
    "latest_reminder": "<\uff5clatest_reminder\uff5c>",
    "think": "<think>",
    "think_end": "</think>",
    "dsml": "\uff5cDSML\uff5c",
    "image": "<\uff5cdeepseek_image\uff5c>",
}


class Tokenizer:
    """A model's tokenizer: encode text, decode ids, name the special ids."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.special = SpecialIds(**{k: backend.token_to_id(v) for k, v in _MARKERS.items()})
        added = backend.get_added_tokens_decoder()
        self._spellings = tuple(token.content for token in added.values())
        self.special_ids = self.special.present() | {
            k for k, token in added.items() if token.special
        }

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Read `directory`/tokenizer.json. Raises ConfigError when it is missing or unreadable."""
        path = directory / TOKENIZER_NAME
        if not path.is_file():
            raise ConfigError(f"{path}: no such file; the model's folder must hold its tokenizer")
        try:
            return cls(Backend.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception for every fault
            raise ConfigError(f"{path}: not a readable tokenizer: {error}") from error

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Tokenizer:
        """Return a model's tokenizer: its tokenizer.json, else what a GGUF's metadata hold.

        Raises ConfigError where neither is there or usable.
        """
        if checkpoint.gguf is None or (checkpoint.directory / TOKENIZER_NAME).is_file():
            return cls.load(checkpoint.directory)
        return cls(gguf_tokenizer(checkpoint.gguf.index))

    @property
    def n_ids(self) -> int:
        """Number of ids, special ones included."""
        return int(self._backend.get_vocab_size())

    def encode(self, text: str, *, markers: bool = False) -> list[int]:
        """Return the ids of `text`; nothing is put in front or behind.

        markers   True: spelled markers such as `<think>` become their special ids.
                  False: they stay text, as text that others wrote must.

        Other threads run meanwhile: the library keeps them waiting only where it encodes one text
        by itself.

        Raises ConfigError for a text that came from bytes that are not UTF-8.
        """
        backend = self._backend
        if not markers and any(spelling in text for spelling in self._spellings):
            backend = self._plain
        try:
            (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
            return list(encoding.ids)
        except TypeError:
            place = next(k for k, character in enumerate(text) if "\ud800" <= character <= "\udfff")
            raise ConfigError(f"text: what stands at character {place} is not UTF-8") from None

    def fewest_ids(self, text: str) -> int:
        """Return a number of ids that `text` has at least, from its length alone; 0: unknown."""
        longest = self._longest
        return 0 if longest is None else -(-len(text.encode("utf-8", "surrogatepass")) // longest)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of `ids` at once; the special tokens' own text only where asked."""
        decoder = self.decoder(special=special)
        return "".join(decoder.add(token_id) for token_id in ids) + decoder.finish()

    def spelling(self, token_id: int) -> bytes:
        """Return the bytes of one token, which may begin or end inside a character."""
        decoder = self.decoder(special=True)
        if isinstance(decoder, ByteLevelDecoder):
            return decoder.token_bytes(token_id)
        return (decoder.add(token_id) + decoder.finish()).encode()

    def decoder(self, *, special: bool = False) -> TextDecoder:
        """Return an incremental decoder; special tokens give no text unless asked."""
        skip = frozenset() if special else self.special_ids
        if self._is_byte_level:
            return ByteLevelDecoder(self._backend, skip)
        return WordDecoder(self._backend, skip)

    @cached_property
    def _is_byte_level(self) -> bool:
        return type(self._backend.decoder).__name__ == "ByteLevel"

    @cached_property
    def _longest(self) -> int | None:
        return longest_token(self._backend)

    @cached_property
    def _plain(self) -> Backend:
        """The same tokenizer without its added vocabulary; made when a text spells a marker."""
        raw = json.loads(self._backend.to_str())
        raw["added_tokens"] = []
        raw["post_processor"] = None
        return Backend.from_str(json.dumps(raw))


class TextDecoder:
    """Turns ids into text one at a time."""

    def add(self, token_id: int) -> str:
        """Return the characters that `token_id` completes, often one word, sometimes none."""
        raise NotImplementedError

    def finish(self) -> str:
        """Return what is left when no id follows: U+FFFD for half a character."""
        raise NotImplementedError


def _byte_of_character() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 bytes stand for themselves, the other 68 for U+0100 onwards in byte order.
    Source: the byte-level BPE alphabet that GPT-2 introduced.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {chr(byte): byte for byte in shown}
    return table | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


class ByteLevelDecoder(TextDecoder):
    """For byte-level BPE: joins the tokens' bytes and decodes UTF-8 incrementally."""

    _bytes = _byte_of_character()

    def __init__(self, backend: Backend, skip: frozenset[int]) -> None:
        self._backend = backend
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        """Return the characters that `token_id` completes."""
        if token_id in self._skip:
            return ""
        return self._utf8.decode(self.token_bytes(token_id))

    def finish(self) -> str:
        """Return U+FFFD when the bytes end inside a character."""
        return self._utf8.decode(b"", final=True)

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds, skipped or not; nothing for an unknown id."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes([self._bytes[character] for character in token])
        except KeyError:  # an added token is stored as plain text
            return token.encode()


class WordDecoder(TextDecoder):
    """For every other kind: the library's own incremental decoding."""

    def __init__(self, backend: Backend, skip: frozenset[int]) -> None:
        self._backend = backend
        self._skip = skip
        self._stream = DecodeStream(skip_special_tokens=False)

    def add(self, token_id: int) -> str:
        """Return the characters that `token_id` completes."""
        if token_id in self._skip:
            return ""
        return self._stream.step(self._backend, token_id) or ""

    def finish(self) -> str:
        """Return nothing: the library keeps what is incomplete."""
        return ""
