"""Prompts from a Jinja chat template that the operator names (`--chat-template FILE`).

The template is run in a sandbox and sees what such templates usually see: messages, tools,
add_generation_prompt, bos_token, eos_token, thinking. A marker that somebody spelled in a message
is broken by a character that occurs nowhere else before the template runs and mended afterwards,
so it stays text; markers of the template itself become their ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from protocol.errors import ConfigError

from .effort import EncodingSettings
from .errors import RequestError
from .plain_chat import json_constraint, refuse_tools
from .prompt import Prompt, Start, cut_spans, output_start, token_ids
from .request_fields import Api, Fields, calls_allowed, mapping, read_fields
from .turns import read_text, read_turns

if TYPE_CHECKING:
    from compute.frontend.tokenizer import Tokenizer

_RARE = [chr(code) for code in range(0xA490, 0xA4C7)]  # Yi radicals: letters, so never escaped
_TEXT_ONLY = "the chat template takes text only"
_FAULTS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class TemplateEncoder:
    """Requests to prompts by a chat template."""

    def __init__(self, tokenizer: Tokenizer, settings: EncodingSettings, path: Path) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._path = path
        self._source, self._template = _load(path)
        special = tokenizer.special
        self._names = {
            "bos_token": self._spelling(special.begin),
            "eos_token": self._spelling(special.end),
        }
        spellings = [self._spelling(token_id) for token_id in tokenizer.special_ids]
        longest_first = sorted(filter(None, spellings), key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def encode(self, api: Api, body: Any, context: int | None = None) -> Prompt:
        """Return the prompt of a request body. Raises RequestError."""
        fields = read_fields(api, body, self._settings)
        written = json.dumps(fields.body, ensure_ascii=False)
        breaker, end = _absent_from(written, self._source)[:2]
        messages = self._messages(fields)
        if fields.prefix:
            messages[-1]["content"] = str(messages[-1].get("content") or "") + end
        text = self._render(fields, body, self._broken(messages, breaker), breaker)
        if fields.prefix:
            text = text.partition(end)[0]
        spans = [
            span if span.special else span._replace(text=span.text.replace(breaker, ""))
            for span in cut_spans(text, (found.span() for found in self._marker.finditer(text)))
        ]
        ids = token_ids(spans, self._tokenizer, context)
        prompt = Prompt(
            ids=ids,
            spans=tuple(spans),
            start=output_start(ids, self._tokenizer),
            effort=fields.effort,
            parse_calls=calls_allowed(fields.body),
            constraint=json_constraint(fields),
        )
        if fields.prefix and prompt.start is Start.TEXT:
            prompt = replace(prompt, start=Start.TEXT_CONTINUED)
        return prompt

    def _messages(self, fields: Fields) -> list[dict[str, Any]]:
        if fields.api is Api.CHAT and any(_is_call(item) for item in fields.body["messages"]):
            return [_opened_arguments(message) for message in fields.body["messages"]]
        if fields.api is not Api.CHAT:
            refuse_tools(fields, "with --chat-template only Chat Completions requests take tools")
        turns = read_turns(fields, _TEXT_ONLY)
        return [
            {"role": turn.role, "content": turn.text}
            | ({"reasoning_content": turn.reasoning} if turn.reasoning else {})
            for turn in turns
        ]

    def _render(self, fields: Fields, body: Mapping[str, Any], messages: Any, breaker: str) -> str:
        thinks = fields.effort is not None
        names: dict[str, Any] = {
            **self._names,
            "thinking": thinks,
            "enable_thinking": thinks,
            "reasoning_effort": fields.effort,
            **mapping(body.get("chat_template_kwargs"), "chat_template_kwargs"),
            "messages": messages,
            "add_generation_prompt": not fields.prefix,
            "tools": None,
        }
        if calls_allowed(fields.body):
            names["tools"] = self._broken(fields.body["tools"], breaker)
        try:
            return self._template.render(names)
        except _FAULTS as error:
            raise RequestError(f"the chat template {self._path.name} refuses: {error}") from None

    def _broken(self, value: Any, breaker: str) -> Any:
        """`value` with every spelled marker broken after its first character."""
        if isinstance(value, str):
            return self._marker.sub(lambda found: found[0][0] + breaker + found[0][1:], value)
        if isinstance(value, Mapping):
            return {key: self._broken(item, breaker) for key, item in value.items()}
        if isinstance(value, list):
            return [self._broken(item, breaker) for item in value]
        return value

    def _spelling(self, token_id: int | None) -> str:
        return "" if token_id is None else self._tokenizer.decode([token_id], special=True)


def _load(path: Path) -> tuple[str, Template]:
    """The template's source and what it compiles to. Raises ConfigError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    try:
        source = path.read_text(encoding="utf-8")
        return source, environment.from_string(source)
    except TemplateError as error:
        raise ConfigError(f"{path}: not a chat template: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _to_json(value: Any, indent: int | None = None, **form: Any) -> str:
    """The filter `tojson` as chat templates know it; nothing is escaped for HTML or ASCII."""
    known = {key: form[key] for key in ("separators", "sort_keys") if key in form}
    return json.dumps(value, ensure_ascii=False, indent=indent, **known)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _absent_from(*written: str) -> list[str]:
    """Rare characters that stand in none of the texts."""
    found = [character for character in _RARE if not any(character in text for text in written)]
    if len(found) < 2:
        raise RequestError("the request holds too many different Yi radicals (U+A490 to U+A4C6)")
    return found


def _is_call(message: Mapping[str, Any]) -> bool:
    return bool(message.get("tool_calls")) or message.get("role") == "tool"


def _opened_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with text for content and its calls' arguments as objects, for templates."""
    content, calls = message.get("content"), message.get("tool_calls")
    message = {**message, "content": "" if content is None else read_text(content, _TEXT_ONLY)}
    if not isinstance(calls, list):
        return message
    opened = []
    for call in calls:
        call = mapping(call, "tool_calls")
        function = dict(mapping(call.get("function"), "function"))
        try:
            function["arguments"] = json.loads(function["arguments"])
        except (KeyError, TypeError, ValueError, RecursionError):
            function.setdefault("arguments", {})
        opened.append({**call, "function": function})
    return {**message, "tool_calls": opened}
