from __future__ import annotations

import json
import sys

import pytest

from compute.frontend.constraints import grammar_of
from compute.frontend.encoding import Constraint, RequestError


def _schema(grammar: bytes) -> object:
    return json.loads(grammar)["grammars"][0]["json_schema"]


def test_without_a_constraint_there_is_no_grammar() -> None:
    assert grammar_of(None) == b""
    assert grammar_of(Constraint("tool_call", "[]")) == b""


def test_json_mode_is_any_object() -> None:
    found = _schema(grammar_of(Constraint("json", "")))
    assert isinstance(found, dict)
    assert found["type"] == "object"


def test_a_schema_keeps_its_keywords_and_bounds_blanks() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    found = _schema(grammar_of(Constraint("json", json.dumps(schema))))
    assert isinstance(found, dict)
    assert {name: found[name] for name in schema} == schema
    assert "40" in found["x-guidance"]["whitespace_pattern"]


def test_an_expression_becomes_a_grammar() -> None:
    assert b"ab" in grammar_of(Constraint("regex", "(ab)+"))


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
        grammar_of(Constraint(kind, schema))
    assert (caught.value.param, caught.value.status) == ("response_format", 400)


def test_without_the_library_the_request_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"headrace\[serve\]") as caught:
        grammar_of(Constraint("json", ""))
    assert caught.value.status == 501
