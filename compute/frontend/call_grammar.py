"""The grammar of tool calls: names that exist, parameters that are declared, values of their types.

The form is the model's own: after the DSML marker `calls>`, for each call `invoke name="F">`, its
parameters, one a line, in the order of the schema, and the end tags. Text values are raw, so one
ends at the first `</` that the marker follows, by its id; all others are JSON of their schema.
Source: model specification, section 11, call block.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

# Unbounded blanks between JSON's tokens would let a weak model write nothing else.
BLANKS = r"[\x20\x0A\x0D\x09]{1,40}"
_DEFINITIONS = ("$defs", "definitions")
_ANY_SCHEMA: Mapping[str, Any] = {}


class CallGrammar:
    """Writes the grammar of some tools, in llguidance's dialect of Lark.

    tools     as {"function": {"name", "parameters"}}
    dsml      the marker's id
    opened    True: the prompt has opened the block. False: the grammar binds behind the first
              marker of the output
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]], dsml: int, *, opened: bool) -> None:
        self._marker = f"<[{dsml}]>"
        self._rules: list[str] = []
        calls = [self._call(place, tool["function"]) for place, tool in enumerate(tools)]
        opening = "" if opened else _quoted(" calls>\n")
        self._add("start", f'{opening} call+ "</" {self._marker} {_quoted(" calls>")}')
        self._add("call", " | ".join(calls))
        self._add("text", "chunk+")
        self._rules.append(r"chunk[lazy]: /(.|\n)*<\//")

    @property
    def text(self) -> str:
        """The grammar."""
        return "%llguidance {}\n" + "\n".join(self._rules) + "\n"

    def _call(self, place: int, function: Mapping[str, Any]) -> str:
        schema = function.get("parameters")
        schema = schema if isinstance(schema, Mapping) else _ANY_SCHEMA
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        shared = {name: schema[name] for name in _DEFINITIONS if name in schema}
        parameters = []
        for number, (name, own) in enumerate(properties.items()):
            rule = self._parameter(f"p_{place}_{number}", name, own, shared)
            parameters.append(rule if name in required else f"{rule}?")
        if not required:
            parameters = [f"({' '.join(parameters)} | {_quoted(chr(10))})"]
        head = _quoted(f' invoke name="{function["name"]}">\n')
        body = " ".join(parameters)
        tail = f'"</" {self._marker} {_quoted(" invoke>" + chr(10))}'
        return self._add(f"call_{place}", f'"<" {self._marker} {head} {body} {tail}')

    def _parameter(self, rule: str, name: str, schema: Any, shared: Mapping[str, Any]) -> str:
        forms = []
        if _may_be_text(schema):
            forms.append(self._form(name, "true", f"{self._value(rule, schema)} {self._marker}"))
        if not _is_text(schema):
            own = schema if isinstance(schema, Mapping) else _ANY_SCHEMA
            whole = {**shared, **own, "x-guidance": {"whitespace_pattern": BLANKS}}
            value = self._add(f"{rule}_json", f"%json {json.dumps(whole)}")
            forms.append(self._form(name, "false", f'{value} "</" {self._marker}'))
        return self._add(rule, " | ".join(forms))

    def _form(self, name: str, is_text: str, value: str) -> str:
        head = _quoted(f' parameter name="{name}" string="{is_text}">')
        return f'"<" {self._marker} {head} {value} {_quoted(" parameter>" + chr(10))}'

    def _value(self, rule: str, schema: Any) -> str:
        """A text value with the `</` that ends it."""
        words = _words(schema)
        if words is None:
            return "text"
        choices = " | ".join(_quoted(word + "</") for word in words)
        return self._add(f"{rule}_word", choices)

    def _add(self, rule: str, body: str) -> str:
        self._rules.append(f"{rule}: {body}")
        return rule


def _quoted(text: str) -> str:
    return json.dumps(text)


def _is_text(schema: Any) -> bool:
    """Whether a value can be nothing but a string."""
    if not isinstance(schema, Mapping):
        return False
    return schema.get("type") == "string" or ("type" not in schema and _words(schema) is not None)


def _may_be_text(schema: Any) -> bool:
    """Whether a value may be a string; where the schema does not say at once, it may."""
    if not isinstance(schema, Mapping):
        return bool(schema)
    kind = schema.get("type")
    if isinstance(kind, str):
        return kind == "string"
    if isinstance(kind, list):
        return "string" in kind
    if "const" in schema or "enum" in schema:
        return _words(schema) is not None
    return True


def _words(schema: Any) -> list[str] | None:
    """The only strings that a value may be; None where it may be others, or is no string."""
    if not isinstance(schema, Mapping):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not values:
        return None
    return values if all(isinstance(value, str) for value in values) else None
