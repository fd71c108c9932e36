"""Prompts without the recipe library: plain talk, with the model's markers or with none.

With markers the prompt is the one that the library renders for a talk without tools. Without them
names stand before what is said, and a stop string ends the answer where the model would go on as
the user.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .effort import EncodingSettings, effort_line
from .errors import RequestError
from .prompt import Constraint, Prompt, Span, Start, marker, opened, output_start, token_ids
from .request_fields import Api, Fields, calls_allowed, mapping, read_fields
from .turns import Turn, read_turns

if TYPE_CHECKING:
    from compute.frontend.tokenizer import Tokenizer

_NAMES = {"system": "System", "user": "User", "assistant": "Assistant"}


class MarkerEncoder:
    """Talk in V4.1 form, without tools.

    missing   why there is no more, for the refusal of what needs it
    """

    def __init__(self, tokenizer: Tokenizer, settings: EncodingSettings, missing: str) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._missing = missing
        special = tokenizer.special
        self._begin = marker(tokenizer, special.begin)
        self._end = marker(tokenizer, special.end)
        self._assistant = marker(tokenizer, special.assistant)
        self._think = marker(tokenizer, special.think)
        self._think_end = marker(tokenizer, special.think_end)
        self._role = {
            "system": marker(tokenizer, special.system),
            "user": marker(tokenizer, special.user),
        }

    def encode(self, api: Api, body: Any, context: int | None = None) -> Prompt:
        """Return the prompt of a request body. Raises RequestError."""
        fields = read_fields(api, body, self._settings)
        refuse_tools(fields, self._missing)
        turns = read_turns(fields, self._missing)
        spans = [span for span in self._spans(turns, fields) if span.text]
        ids = token_ids(spans, self._tokenizer, context)
        return Prompt(
            ids=ids,
            spans=tuple(spans),
            start=output_start(ids, self._tokenizer),
            effort=fields.effort,
            constraint=json_constraint(fields),
        )

    def _spans(self, turns: list[Turn], fields: Fields) -> list[Span]:
        spans = [self._begin]
        if fields.effort is not None:
            spans += [self._role["system"], Span(effort_line(fields.effort))]
            if turns[0].role == "system":
                spans.append(Span(turns[0].text))
                turns = turns[1:]
        spoken = [place for place, turn in enumerate(turns) if turn.role != "assistant"]
        last_turn = max(spoken, default=-1)
        before = ""
        for place, turn in enumerate(turns):
            goes_on = fields.prefix and place == len(turns) - 1
            if turn.role == "assistant":
                keep = fields.effort is not None and place > last_turn
                spans += self._answer(turn, keep=keep, goes_on=goes_on)
            elif turn.role == "user" and before == "user":
                spans.append(Span("\n\n" + turn.text))
            elif turn.text or turn.role == "user":
                spans += [self._role[turn.role], Span(turn.text)]
            before = turn.role
        if not fields.prefix:
            spans += [self._assistant, self._think if fields.effort else self._think_end]
        return _joined(spans)

    def _answer(self, turn: Turn, *, keep: bool, goes_on: bool) -> list[Span]:
        spans = [self._assistant]
        if keep:
            spans += [self._think, Span(turn.reasoning)]
        if not (keep and goes_on and not turn.text):
            spans += [self._think_end, Span(turn.text)]
        return spans if goes_on else [*spans, self._end]


class PlainEncoder:
    """Talk for a model without markers; it does not think, whatever is asked."""

    def __init__(self, tokenizer: Tokenizer, settings: EncodingSettings, missing: str) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._missing = missing

    def encode(self, api: Api, body: Any, context: int | None = None) -> Prompt:
        """Return the prompt of a request body. Raises RequestError."""
        fields = read_fields(api, body, self._settings)
        refuse_tools(fields, self._missing)
        turns = read_turns(fields, self._missing)
        said = [f"{_NAMES[turn.role]}: {turn.text}" for turn in turns]
        text = "\n\n".join(said if fields.prefix else [*said, "Assistant:"])
        spans = opened((Span(text),), self._tokenizer)
        return Prompt(
            ids=token_ids(spans, self._tokenizer, context),
            spans=spans,
            start=Start.TEXT_CONTINUED if fields.prefix else Start.TEXT,
            constraint=json_constraint(fields),
            stops=("\n\nUser:", "\n\nSystem:"),
        )


def refuse_tools(fields: Fields, missing: str) -> None:
    """Raise RequestError where the request lets the model call tools."""
    if calls_allowed(fields.body):
        raise RequestError(f"tools cannot be used: {missing}", param="tools")


def json_constraint(fields: Fields) -> Constraint | None:
    """Return what the answer must match, from the API's own field. Raises RequestError."""
    param, holder = {
        Api.CHAT: ("response_format", fields.body.get("response_format")),
        Api.MESSAGES: (
            "output_config.format",
            mapping(fields.body.get("output_config"), "output_config").get("format"),
        ),
        Api.RESPONSES: ("text.format", mapping(fields.body.get("text"), "text").get("format")),
    }[fields.api]
    wanted = mapping(holder, param)
    kind = wanted.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint("json", "")
    if kind == "json_schema":
        named: Mapping[str, Any] = mapping(wanted.get("json_schema", wanted), param)
        return Constraint("json", json.dumps(mapping(named.get("schema"), f"{param}.schema")))
    raise RequestError(f"{param}: {kind!r} is none of text, json_object, json_schema", param=param)


def _joined(spans: list[Span]) -> list[Span]:
    """The spans with neighbouring plain ones made one, as they are tokenised."""
    joined: list[Span] = []
    for span in spans:
        if joined and not span.special and not joined[-1].special:
            joined[-1] = Span(joined[-1].text + span.text)
        else:
            joined.append(span)
    return joined
