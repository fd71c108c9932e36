from __future__ import annotations

from pathlib import Path

from compute.frontend.text_stream import TextStream
from compute.frontend.tokenizer import Tokenizer

DEMO = Tokenizer.load(Path(__file__).resolve().parents[3] / "demo")


def _text(stream: TextStream, ids: list[int]) -> str:
    shown = ""
    for token_id in ids:
        shown += stream.add(token_id)
        if stream.stopped:
            return shown
    return shown + stream.finish()


def test_text_ends_before_a_stop_string_that_spans_tokens() -> None:
    ids = DEMO.encode("I will not go.\n\nKING JOHN.\nAway!")
    assert _text(TextStream(DEMO, ["\n\nKING"]), ids) == "I will not go."


def test_text_without_a_stop_string_comes_whole() -> None:
    ids = DEMO.encode("I will not go.\n\nKIN")
    assert _text(TextStream(DEMO, ["\n\nKING"]), ids) == "I will not go.\n\nKIN"


def test_special_tokens_are_spelled_only_when_asked() -> None:
    assert _text(TextStream(DEMO), [7, 8]) == ""
    assert _text(TextStream(DEMO, special=True), [7, 8]) == "<think></think>"
