"""What an answer must match, as a grammar for compute: checked here, before anything is queued.

The library is llguidance, as in compute/grammar.py, where the choice is explained.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from typing import Any

from protocol.wording import to_install

from .call_grammar import BLANKS, CallGrammar
from .encoding import Prompt, RequestError, Start
from .tokenizer import Tokenizer

_ANY_OBJECT = '{"type": "object"}'
_FORMAT = "response_format"


@dataclass(frozen=True, slots=True)
class BoundGrammar:
    """A grammar and where it begins to bind."""

    text: bytes = b""  # empty: there is none
    after: int | None = None  # the id behind which it binds; None: at once


def grammar_of(prompt: Prompt, tokenizer: Tokenizer) -> BoundGrammar:
    """Return the grammar of the answer to a prompt, in the library's text form.

    Raises RequestError where the library cannot follow the constraint, or is not there.
    """
    constraint, special = prompt.constraint, tokenizer.special
    if constraint is None:
        return BoundGrammar()
    matcher = _library().LLMatcher
    after: int | None = None
    param = _FORMAT
    try:
        if constraint.kind in ("tool_call", "tool_call_required"):
            param = "tools"
            opened = prompt.start is Start.CALLS
            after = None if opened else special.dsml
            grammar = matcher.grammar_from_lark(_calls(constraint.schema, special.dsml, opened))
        else:
            thinks = prompt.start in (Start.REASONING, Start.REASONING_CONTINUED)
            after = special.think_end if thinks else None
            if constraint.kind == "regex":
                grammar = matcher.grammar_from_regex(constraint.schema)
            else:
                grammar = matcher.grammar_from_json_schema(
                    _schema(constraint.schema), overrides={"whitespace_pattern": BLANKS}
                )
    except ValueError as error:
        raise RequestError(f"{param}: {error}", param=param) from None
    failed, words = matcher.validate_grammar_with_warnings(grammar)
    if failed:
        raise RequestError(f"{param}: {words[0] if words else 'no grammar'}", param=param)
    return BoundGrammar(str(grammar).encode(), after)


def _calls(tools: str, dsml: int | None, opened: bool) -> str:
    assert dsml is not None  # a model without the marker is told of no tools
    return CallGrammar(json.loads(tools), dsml, opened=opened).text


def _schema(text: str) -> str:
    if not text:
        return _ANY_OBJECT
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{_FORMAT}: the schema is not JSON: {error}", param=_FORMAT) from None
    if not isinstance(found, dict | bool):
        raise RequestError(f"{_FORMAT}: the schema is no JSON schema", param=_FORMAT)
    return text


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise RequestError(
            f"{_FORMAT}: this server cannot hold answers to a grammar: the package llguidance is "
            f"missing ({to_install('serve')})",
            param=_FORMAT,
            status=501,
        ) from None
