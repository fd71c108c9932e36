"""What is read does not depend on how the output is cut, and no marker shows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from compute.frontend.encoding import OutputParser, Start
from compute.frontend.tokenizer import Tokenizer
from tests.support.encoding_cases import (
    DSML,
    TOKENIZER,
    answer_of,
    demo_tokenizer,
    golden,
    marked,
    read,
)

TEXTS = [
    case["text"]
    for case in golden("outputs.json")
    if case["name"] not in ("plain_chat", "empty_chat")
]
PIECES = [
    *("a", "b c", " ", "\n", "\n\n", "<", "</", ">", '"', "\\", "é", "漢", "🧭", "\x00", "name="),
    *("</think>", "<think>", DSML, f"<{DSML}", f"</{DSML}", "<\uff5cUser\uff5c>"),
    *(f"<{DSML} calls>\n", f"</{DSML} calls>", f"</{DSML} invoke>\n", f"</{DSML} parameter>\n"),
    *(f'<{DSML} invoke name="f">\n', f'<{DSML}invoke name="g h"/>', f"<{DSML} invoke>"),
    *(f'<{DSML} parameter name="x" string="true">', f'<{DSML} parameter name="x y" string="no">'),
    *(f'<{DSML} parameter name="x" string="false">', f'<{DSML} parameter name="z">', "STOP"),
    *("12", "[1, 2]", '{"k": "v"}', "nul", "l", " calls>", " invoke>", ' string="true">'),
]


def as_characters() -> Tokenizer:
    """A byte-level tokenizer without merges: a token is a byte or a marker."""
    raw = json.loads(TOKENIZER.read_text())
    raw["model"]["merges"] = []
    return Tokenizer(Backend.from_str(json.dumps(raw)))


CHARACTERS = as_characters()
outputs = st.lists(st.sampled_from(PIECES), max_size=16)
opened = st.just(["t\n\n", f"<{DSML} calls>\n", f'<{DSML} invoke name="f">\n'])
starts = st.sampled_from(list(Start))
stop_lists = st.sampled_from([(), ("STOP",), ("\n\n", "a"), ("b c",)])


def ids_of(pieces: list[str], spelled: list[bool]) -> list[int]:
    """Ids of the pieces, each of which is spelled or real where it holds a marker."""
    tokenizer = demo_tokenizer()
    return [
        token_id
        for piece, is_spelled in zip(pieces, spelled, strict=True)
        for token_id in tokenizer.encode(piece, markers=not is_spelled)
    ]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("start", [Start.TEXT, Start.REASONING])
def test_every_split_of_a_golden_output_reads_alike(text: str, start: Start) -> None:
    ids = marked(text)
    whole = read(ids, start)
    assert read(ids, start, pieces=range(1, len(ids))) == whole
    for place in range(1, len(ids)):
        assert read(ids, start, pieces=[place]) == whole


@pytest.mark.parametrize("text", TEXTS)
def test_one_byte_at_a_time_reads_like_whole_tokens(text: str) -> None:
    parser = OutputParser(CHARACTERS, Start.REASONING)
    ids = CHARACTERS.encode(text, markers=True)
    events = [event for token_id in ids for event in parser.add(token_id)]
    assert answer_of([*events, *parser.finish()]) == read(marked(text), Start.REASONING)


@settings(max_examples=150, deadline=None)
@given(st.data(), outputs | st.tuples(opened, outputs).map(lambda two: two[0] + two[1]))
def test_any_output_reads_alike_in_any_bursts(data: st.DataObject, pieces: list[str]) -> None:
    spelled = data.draw(st.lists(st.booleans(), min_size=len(pieces), max_size=len(pieces)))
    ids = ids_of(pieces, spelled)
    options: dict[str, Any] = {
        "cut": data.draw(st.booleans()),
        "parse_calls": data.draw(st.booleans()),
        "stops": data.draw(stop_lists),
    }
    start = data.draw(starts)
    bursts = sorted(data.draw(st.sets(st.integers(0, len(ids)))))
    whole = read(ids, start, **options)
    assert read(ids, start, pieces=bursts, **options) == whole
    assert read(ids, start, pieces=range(1, len(ids)), **options) == whole
    for call in whole.calls:
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)
            assert json.loads(call.streamed) == json.loads(call.arguments)
            assert len(json.loads(call.arguments, object_pairs_hook=list)) == len(
                json.loads(call.arguments)
            )


@settings(max_examples=150, deadline=None)
@given(outputs, starts, st.booleans())
def test_no_marker_shows_in_reasoning_or_text(
    pieces: list[str], start: Start, parse_calls: bool
) -> None:
    answer = read(marked("".join(pieces)), start, parse_calls=parse_calls)
    for shown in (answer.reasoning, answer.text):
        assert DSML not in shown and "\uff5c" not in shown
        assert "</think>" not in shown and "<think>" not in shown
    assert parse_calls or start is Start.CALLS or not answer.calls


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([*PIECES, "</think>", "plain"]), max_size=12))
def test_spelled_markers_are_text(pieces: list[str]) -> None:
    text = "x" + "".join(pieces)
    ids = demo_tokenizer().encode(text)
    assert read(ids, Start.TEXT).text == text
    assert read(ids, Start.REASONING).reasoning == text
