"""The vendor's own prompt encoder, through its package `deepseek-recipe`; the one place for it.

Requests of the three APIs become V4.1 prompts. What the package does otherwise than the model
specification (section 11) or the APIs is repaired here: efforts that are numbers, reasoning inside
a tool round that declares no tools, numbers beyond 64 bits, arguments encoded twice, an assistant
message to be continued in the Messages API or beside tools, and a demand for a call of any tool in
the Messages API. Importing this module fails where the package is not installed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import deepseek_recipe as library

from .effort import EncodingSettings, effort_line
from .errors import RequestError
from .exact_numbers import ExactNumbers
from .prompt import Constraint, Prompt, Span, Start, cut_spans, output_start, token_ids
from .request_fields import Api, Fields, read_fields

if TYPE_CHECKING:
    from compute.frontend.tokenizer import Tokenizer

_MODEL = "model"
_THINK, _THINK_END, _ASSISTANT, _SYSTEM = (
    token.default_str()
    for token in (
        library.SpecialToken.ThinkingStart,
        library.SpecialToken.ThinkingEnd,
        library.SpecialToken.Assistant,
        library.SpecialToken.System,
    )
)
_EFFORT_LINE = "Reasoning Effort: 75 ("  # what the package prints where it is told "high"


class RecipeEncoder:
    """Requests to prompts as the vendor renders them."""

    def __init__(self, tokenizer: Tokenizer, settings: EncodingSettings) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        image = tokenizer.special.image
        spelled = None if image is None else tokenizer.decode([image], special=True)
        tokens = library.SpecialTokens(image=spelled)
        version = library.ModelVersion.DeepseekV41Flash
        self._options = (
            library.ConversionOptions()
            .with_model_alias(_MODEL, version)
            .with_special_tokens(tokens)
        )
        self._encoding = library.DeepseekV41Encoding().with_special_tokens(tokens)

    def encode(self, api: Api, body: Any, context: int | None = None) -> Prompt:
        """Return the prompt of a request body. Raises RequestError."""
        fields = read_fields(api, body, self._settings)
        numbers = ExactNumbers(fields.body)
        request, namespaces = self._convert(fields, numbers)
        conversation = request.conversation
        must_call = request.parsing_options.starts_in_tool_calls or _choice_is_any(fields)
        if fields.prefix and must_call:
            raise RequestError("tool_choice: no call can be forced while a message is continued")
        if fields.prefix or must_call:
            conversation = _mended(conversation, prefix=fields.prefix, must_call=must_call)
        if any(message.image_sources for message in conversation.messages):
            raise RequestError("images cannot be read yet: send text only", param="messages")
        rendered = self._encoding.render_conversation(conversation)
        spans = cut_spans(rendered.prompt, rendered.special_ranges)
        if fields.effort is not None:
            spans = _keep_reasoning(spans, conversation.messages)
            spans = _set_effort(spans, fields.effort)
        spans = [Span(numbers.show(text), special) for text, special in spans]
        ids = token_ids(spans, self._tokenizer, context)
        return Prompt(
            ids=ids,
            spans=tuple(spans),
            start=Start.CALLS if must_call else output_start(ids, self._tokenizer),
            effort=fields.effort,
            parse_calls=request.parsing_options.parse_tool_calls,
            constraint=_constraint(request, numbers, must_call=must_call),
            namespaces=namespaces,
        )

    def _convert(
        self, fields: Fields, numbers: ExactNumbers
    ) -> tuple[library.ConversationRequest, Mapping[str, tuple[str, str]]]:
        try:
            body = numbers.hide(_arguments_as_text(fields, numbers))
            text = json.dumps({"model": _MODEL, **body, **_thinking(fields)})
            if fields.api is Api.CHAT:
                return library.ChatCompletionRequest(text).convert(self._options), {}
            if fields.api is Api.MESSAGES:
                return library.MessagesRequest(text).convert(self._options), {}
            request = library.ResponsesRequest(text)
            namespaces = request.namespace_tool_map(self._options)
            return request.convert(self._options), namespaces
        except library.ConversionError as error:
            raise RequestError(_reason(error), status=error.status_code) from None
        except (ValueError, OverflowError) as error:
            raise RequestError(str(error)) from None


def _thinking(fields: Fields) -> dict[str, Any]:
    thinks = fields.effort is not None
    if fields.api is Api.RESPONSES:
        return {"reasoning": {"effort": "high" if thinks else "none"}}
    return {"thinking": {"type": "enabled" if thinks else "disabled"}}


def _arguments_as_text(fields: Fields, numbers: ExactNumbers) -> dict[str, Any]:
    """The body with the arguments of every earlier call as the text of a JSON object.

    `prefix` is left out: the library refuses it beside tools.
    """
    body = dict(fields.body)
    if fields.api is Api.CHAT:
        body["messages"] = [_chat_calls(message, numbers) for message in body["messages"]]
    elif fields.api is Api.RESPONSES and isinstance(body.get("input"), list):
        body["input"] = [_with_arguments(item, numbers) for item in body["input"]]
    return body


def _chat_calls(message: dict[str, Any], numbers: ExactNumbers) -> dict[str, Any]:
    message = {key: value for key, value in message.items() if key != "prefix"}
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    mended = [
        {**call, "function": _with_arguments(call.get("function"), numbers)}
        if isinstance(call, dict)
        else call
        for call in calls
    ]
    return {**message, "tool_calls": mended}


def _with_arguments(item: Any, numbers: ExactNumbers) -> Any:
    if not isinstance(item, dict) or "arguments" not in item:
        return item
    return {**item, "arguments": numbers.arguments(item["arguments"])}


def _choice_is_any(fields: Fields) -> bool:
    """Whether a Messages request demands a call of any tool; the library takes it for a wish."""
    choice = fields.body.get("tool_choice") if fields.body.get("tools") else None
    asked = isinstance(choice, dict) and choice.get("type") == "any"
    return asked and fields.api is Api.MESSAGES


def _mended(
    conversation: library.Conversation, *, prefix: bool, must_call: bool
) -> library.Conversation:
    """The conversation, its last message to be continued or a call demanded."""
    messages = conversation.messages
    if prefix and not messages[-1].tool_calls:
        said = messages[-1]
        messages[-1] = library.AssistantMessage(said.content, said.reasoning_content, prefix=True)
    return library.Conversation(
        messages,
        thinking_mode=conversation.thinking_mode,
        tools=conversation.tools,
        tool_choice="required" if must_call else conversation.tool_choice,
        reasoning_effort=conversation.reasoning_effort,
        response_format="json_object" if conversation.response_format == "json_object" else "text",
        response_schema=conversation.response_schema,
        response_regex=conversation.response_regex,
    )


def _keep_reasoning(spans: list[Span], messages: Sequence[library.Message]) -> list[Span]:
    """The prompt with the reasoning of every assistant message after the last turn's start.

    A turn starts with a user message or a later system message, never with tool results alone.
    """
    turns = (
        place
        for place, message in enumerate(messages)
        if message.role == "user" or (message.role == "system" and place > 0)
    )
    last_turn = max(turns, default=-1)
    said = [
        message.reasoning_content or "" if place > last_turn else None
        for place, message in enumerate(messages)
        if message.role == "assistant"
    ]
    headers = [place for place, span in enumerate(spans) if span == (_ASSISTANT, True)]
    for place, reasoning in reversed(list(zip(headers, said, strict=False))):
        if reasoning is not None and spans[place + 1] == (_THINK_END, True):
            kept = [Span(_THINK, special=True), Span(reasoning)] if reasoning else []
            spans[place + 1 : place + 1] = kept or [Span(_THINK, special=True)]
    return spans


def _set_effort(spans: list[Span], effort: int) -> list[Span]:
    """The prompt with `effort` in the line that opens it.

    The package leaves the line out where all it would stand before is an empty system message.
    """
    if len(spans) > 1 and spans[1] == Span(_ASSISTANT, special=True):
        return [spans[0], Span(_SYSTEM, special=True), Span(effort_line(effort)), *spans[1:]]
    line = spans[2].text if len(spans) > 2 else ""
    if not line.startswith(_EFFORT_LINE):
        raise RequestError(
            f"deepseek-recipe {library.__version__} opens a prompt with {line[:40]!r}, wanted "
            f"{_EFFORT_LINE!r}",
            status=500,
        )
    spans[2] = Span(f"Reasoning Effort: {effort} (" + line[len(_EFFORT_LINE) :])
    return spans


def _constraint(
    request: library.ConversationRequest, numbers: ExactNumbers, *, must_call: bool
) -> Constraint | None:
    found = request.inference_options.output_constraint
    if found is None:
        return None
    kind = "tool_call_required" if must_call else found.kind
    return Constraint(kind, numbers.show(found.schema))


def _reason(error: library.ConversionError) -> str:
    try:
        return str(json.loads(error.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return error.body
