from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compute.frontend.constraints import BoundGrammar, grammar_of
from compute.frontend.encoding import (
    CallEnded,
    Constraint,
    OutputParser,
    Prompt,
    RequestError,
    Start,
)
from compute.frontend.tokenizer import Tokenizer
from compute.grammar import Grammars
from compute.logit_rules import LogitRules
from compute.sampler import Sampling, choose

DEMO = Path(__file__).resolve().parents[3] / "demo"
TOKENIZER = Tokenizer.load(DEMO)
GRAMMARS = Grammars(DEMO / "tokenizer.json", 4096, 1)


def _grammar(kind: str, schema: str, start: Start = Start.TEXT) -> BoundGrammar:
    return grammar_of(Prompt((1,), (), start, constraint=Constraint(kind, schema)), TOKENIZER)


def _schema(grammar: BoundGrammar) -> object:
    return json.loads(grammar.text)["grammars"][0]["json_schema"]


def test_without_a_constraint_there_is_no_grammar() -> None:
    assert grammar_of(Prompt((1,), ()), TOKENIZER) == BoundGrammar()


def test_json_mode_is_any_object() -> None:
    found = _schema(_grammar("json", ""))
    assert isinstance(found, dict)
    assert found["type"] == "object"


def test_a_schema_keeps_its_keywords_and_bounds_blanks() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    found = _schema(_grammar("json", json.dumps(schema)))
    assert isinstance(found, dict)
    assert {name: found[name] for name in schema} == schema
    assert "40" in found["x-guidance"]["whitespace_pattern"]


def test_an_expression_becomes_a_grammar() -> None:
    assert b"ab" in _grammar("regex", "(ab)+").text


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        ("json", "{"),
        ("json", "[]"),
        ("json", '{"type": "nothing"}'),
        ("json", '{"$ref": "http://example.invalid/schema"}'),
        ("json", '{"type": "string", "pattern": "("}'),
        ("regex", "("),
    ],
)
def test_what_cannot_be_followed_is_refused_by_the_fields_name(kind: str, schema: str) -> None:
    with pytest.raises(RequestError, match="response_format: ") as caught:
        _grammar(kind, schema)
    assert (caught.value.param, caught.value.status) == ("response_format", 400)


def test_without_the_library_the_request_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install '\.\[serve\]' in the clone") as caught:
        _grammar("json", "")
    assert caught.value.status == 501


# tool calls

TOOLS: list[dict[str, Any]] = [
    {
        "name": "write_file",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "mode": {"enum": ["old", "new"]},
                "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}, "maxItems": 2},
                "note": {"type": ["string", "null"]},
            },
            "required": ["path", "lines"],
            "$defs": {"line": {"type": "integer", "minimum": 0, "maximum": 99}},
        },
    },
    {"name": "stop", "parameters": {"type": "object", "properties": {}}},
    {"name": "ask", "parameters": {"type": "object", "properties": {"why": {"type": "boolean"}}}},
]
FUNCTIONS = json.dumps([{"type": "function", "function": tool} for tool in TOOLS])
MOST_IDS = 1500
DSML, END = TOKENIZER.special.dsml, TOKENIZER.special.end


def _drawn(grammar: BoundGrammar, seed: int, opening: str = "") -> list[int]:
    """Ids drawn from noise that likes the markup, until the grammar allows no more."""
    rules = LogitRules(grammar=GRAMMARS.start(grammar.text.decode(), grammar.after))
    noise = np.random.default_rng(seed)
    ids = TOKENIZER.encode(opening, markers=True)
    for token_id in ids:
        rules.commit(token_id)
    while not rules.ended and len(ids) < MOST_IDS:
        logits = noise.normal(size=4096).astype(np.float32)
        logits[DSML] += 12  # else texts and arrays go on for long
        logits[TOKENIZER.encode("</")] += 8
        ruled = rules.applied(logits)
        ids.append(choose(logits, len(ids), Sampling(seed=seed), ruled=ruled).id)
        if ids[-1] == END:
            break
        rules.commit(ids[-1])
    return ids


def _calls(ids: list[int], start: Start) -> list[CallEnded]:
    parser = OutputParser(TOKENIZER, start)
    events = [*parser.feed(ids), *parser.finish()]
    return [event for event in events if isinstance(event, CallEnded)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("start", [Start.CALLS, Start.REASONING])
def test_noise_under_a_grammar_of_calls_is_calls_of_the_tools(seed: int, start: Start) -> None:
    kind = "tool_call_required" if start is Start.CALLS else "tool_call"
    grammar = _grammar(kind, FUNCTIONS, start)
    assert grammar.after == (None if start is Start.CALLS else DSML)
    opening = "" if start is Start.CALLS else "Hm.</think>So.\n\n<\uff5cDSML\uff5c"
    ids = _drawn(grammar, seed, opening)
    *calls, last = _calls(ids, start)
    assert last.complete or len(ids) == MOST_IDS
    for call in [*calls, *([last] if last.complete else [])]:
        assert call.complete
        given = json.loads(call.arguments)
        assert call.name in ("write_file", "stop", "ask")
        if call.name == "write_file":
            assert {"path", "lines"} <= set(given) <= {"path", "mode", "lines", "note"}
            assert all(0 <= line <= 99 for line in given["lines"])
            assert isinstance(given["path"], str)
            assert given.get("mode", "old") in ("old", "new")
            assert isinstance(given.get("note"), str | None)
        elif call.name == "ask":
            assert isinstance(given.get("why", True), bool)
        else:
            assert given == {}


def test_a_text_value_may_hold_tags_and_even_the_markers_spelling() -> None:
    grammar = _grammar("tool_call_required", FUNCTIONS, Start.CALLS)
    rules = LogitRules(grammar=GRAMMARS.start(grammar.text.decode()))
    value = "<p>one</p>\n</\uff5cDSML\uff5c parameter>\n"
    bar = "\uff5cDSML\uff5c"
    pieces = [
        (f'<{bar} invoke name="write_file">\n<{bar} parameter name="path" string="true">', True),
        (value, False),
        (f'</{bar} parameter>\n<{bar} parameter name="lines" string="false">[1, 2]', True),
        (f"</{bar} parameter>\n</{bar} invoke>\n</{bar} calls>", True),
    ]
    ids = [i for text, markers in pieces for i in TOKENIZER.encode(text, markers=markers)]
    for token_id in ids:
        rules.commit(token_id)
    assert rules.ended
    (call,) = _calls(ids, Start.CALLS)
    assert json.loads(call.arguments) == {"path": value, "lines": [1, 2]}


def test_a_tool_whose_schema_cannot_be_followed_is_refused() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "nothing"}}, "required": ["a"]}
    tools = json.dumps([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    with pytest.raises(RequestError, match="tools: ") as caught:
        _grammar("tool_call_required", tools, Start.CALLS)
    assert caught.value.param == "tools"
