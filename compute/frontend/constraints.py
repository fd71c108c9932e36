"""What an answer must match, as a grammar for compute: checked here, before anything is queued.

The library is llguidance, as in compute/grammar.py, where the choice is explained.
"""

from __future__ import annotations

import importlib
import json
from typing import Any

from .encoding import Constraint, RequestError

# Unbounded blanks between JSON's tokens would let a weak model write nothing else.
_BLANKS = r"[\x20\x0A\x0D\x09]{1,40}"
_ANY_OBJECT = '{"type": "object"}'
_PARAM = "response_format"


def grammar_of(constraint: Constraint | None) -> bytes:
    """Return the grammar of a constraint in the library's text form, empty where there is none.

    Raises RequestError where the library cannot follow it, or is not there.
    """
    if constraint is None or constraint.kind not in ("json", "regex"):
        return b""
    matcher = _library().LLMatcher
    try:
        if constraint.kind == "regex":
            grammar = matcher.grammar_from_regex(constraint.schema)
        else:
            grammar = matcher.grammar_from_json_schema(
                _schema(constraint.schema), overrides={"whitespace_pattern": _BLANKS}
            )
    except ValueError as error:
        raise RequestError(f"{_PARAM}: {error}", param=_PARAM) from None
    failed, words = matcher.validate_grammar_with_warnings(grammar)
    if failed:
        raise RequestError(f"{_PARAM}: {words[0] if words else 'no grammar'}", param=_PARAM)
    return str(grammar).encode()


def _schema(text: str) -> str:
    if not text:
        return _ANY_OBJECT
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{_PARAM}: the schema is not JSON: {error}", param=_PARAM) from None
    if not isinstance(found, dict | bool):
        raise RequestError(f"{_PARAM}: the schema is no JSON schema", param=_PARAM)
    return text


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise RequestError(
            f"{_PARAM}: this server cannot hold answers to a grammar: the package llguidance is "
            "missing (install headrace[serve])",
            param=_PARAM,
            status=501,
        ) from None
