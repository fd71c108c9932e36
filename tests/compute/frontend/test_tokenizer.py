from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from compute.frontend.longest_token import longest_token
from compute.frontend.tokenizer import Tokenizer
from protocol.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
DEMO = Tokenizer.load(ROOT / "demo")


def test_special_ids_are_looked_up_by_their_text() -> None:
    special = DEMO.special
    assert (special.begin, special.end, special.pad) == (0, 1, 2)
    assert (special.user, special.assistant, special.think, special.think_end) == (3, 4, 7, 8)
    assert special.image == 10


def test_spelled_markers_stay_text_unless_asked() -> None:
    plain = DEMO.encode("</think>ab<\uff5cUser\uff5c>")
    assert not set(plain) & DEMO.special_ids
    assert DEMO.decode(plain) == "</think>ab<\uff5cUser\uff5c>"
    marked = DEMO.encode("</think>ab<\uff5cUser\uff5c>", markers=True)
    assert marked[0] == 8 and marked[-1] == 3


def test_ids_of_plain_text_do_not_depend_on_the_marker_switch() -> None:
    text = (ROOT / "demo" / "heldout.txt").read_text()[:20_000]
    assert DEMO.encode(text) == DEMO.encode(text, markers=True)


def test_special_tokens_give_text_only_when_asked() -> None:
    assert DEMO.decode([0, 711, 7]) == DEMO.decode([711])
    assert DEMO.decode([7, 8], special=True) == "<think></think>"


def test_half_a_character_is_never_let_out() -> None:
    ids = DEMO.encode("\U0001f30a wave")
    decoder = DEMO.decoder()
    pieces = [decoder.add(token_id) for token_id in ids]
    assert pieces[0] == ""
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + decoder.finish() == "\U0001f30a wave"


def test_a_text_cut_inside_a_character_ends_in_the_replacement_character() -> None:
    decoder = DEMO.decoder()
    first = DEMO.encode("\U0001f30a")[0]
    assert decoder.add(first) + decoder.finish() == "\ufffd"


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=40))
def test_text_survives_encoding_and_piecewise_decoding(text: str) -> None:
    assert DEMO.decode(DEMO.encode(text)) == text


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(11, 4095), max_size=20))
def test_piecewise_decoding_equals_the_librarys_own(ids: list[int]) -> None:
    assert DEMO.decode(ids) == DEMO._backend.decode(ids, skip_special_tokens=False)


def test_a_text_of_broken_bytes_is_refused_with_its_place() -> None:
    with pytest.raises(ConfigError, match="at character 2 is not UTF-8"):
        DEMO.encode(b"ab\xff".decode("utf-8", "surrogateescape"))


def test_a_word_tokenizer_decodes_too() -> None:
    words = Tokenizer.load(ROOT / "tests" / "data" / "v41-tiny")
    assert words.special.begin is None
    assert words.decode([14, 16]) == words._backend.decode([14, 16])


def test_a_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: no such file"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="not a readable tokenizer"):
        Tokenizer.load(tmp_path)


def test_the_frontend_imports_no_torch() -> None:
    code = (
        "import sys, compute.frontend.tokenizer, compute.frontend.stop_strings\n"
        "raise SystemExit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    text = (ROOT / "demo" / "heldout.txt").read_text() * 8
    pauses, ended = [0.0], threading.Event()

    def watch() -> None:
        while not ended.is_set():
            began = time.monotonic()
            time.sleep(0.001)
            pauses.append(time.monotonic() - began)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.monotonic()
    DEMO.encode(text)
    took = time.monotonic() - began
    ended.set()
    watcher.join()
    assert max(pauses) < took / 2


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_no_text_has_fewer_ids_than_its_length_allows(text: str) -> None:
    assert DEMO.fewest_ids(text) <= len(DEMO.encode(text))


def test_the_fewest_ids_are_the_bytes_over_the_longest_tokens() -> None:
    backend = Backend.from_file(str(ROOT / "demo" / "tokenizer.json"))
    longest = longest_token(backend)
    assert longest is not None
    pieces = [len(DEMO.spelling(token_id)) for token_id in range(DEMO.n_ids)]
    assert longest == max(pieces)
    assert DEMO.fewest_ids("") == 0
    assert DEMO.fewest_ids("\u00e9" * longest) == 2
    assert DEMO.fewest_ids("a" * longest + "b") == 2
    backend.add_tokens(["x" * 1000])  # an added token is text, each character its bytes
    backend.add_tokens(["\u00e9" * 700])
    assert longest_token(backend) == 1400


def test_where_text_may_be_dropped_or_replaced_its_length_says_nothing() -> None:
    raw = json.loads((ROOT / "demo" / "tokenizer.json").read_text())

    def longest(**changed: Any) -> int | None:
        return longest_token(Backend.from_str(json.dumps(raw | changed)))

    assert longest(normalizer={"type": "Sequence", "normalizers": []}) == longest()
    assert longest(normalizer={"type": "NFKC"}) is None
    assert longest(pre_tokenizer={"type": "Whitespace"}) is None
    bytes_alone = raw["pre_tokenizer"]["pretokenizers"][-1]
    assert longest(pre_tokenizer=bytes_alone) == longest()
    dropping = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
    both = {"type": "Sequence", "pretokenizers": [dropping, bytes_alone]}
    assert longest(pre_tokenizer=both) is None
    cut = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    assert longest(truncation=cut) is None
    lacking = {key: number for key, number in raw["model"]["vocab"].items() if key != "\u0100"}
    lacking["\u0100unused"] = raw["model"]["vocab"]["\u0100"]
    assert longest(model=raw["model"] | {"vocab": lacking, "merges": []}) is None
    words = Backend(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    assert longest_token(words) is None
    assert Tokenizer(words).fewest_ids("a" * 99) == 0
