"""What a request body says beside its messages, in any of the three APIs.

Fields that shape the prompt are taken, all others (sampling, streaming, metadata) are the HTTP
layer's. The clients' spellings of one thing are brought to one here: where the effort stands, how
thinking is switched, which message is to be continued, what the system role is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .effort import EncodingSettings
from .errors import RequestError


class Api(Enum):
    """The API whose request body is read."""

    CHAT = "chat completions"
    MESSAGES = "messages"
    RESPONSES = "responses"


_SHAPING = {
    Api.CHAT: ("messages", "tools", "tool_choice", "response_format"),
    Api.MESSAGES: ("messages", "system", "tools", "tool_choice", "output_config"),
    Api.RESPONSES: ("input", "instructions", "tools", "tool_choice", "text"),
}
_STORED = ("previous_response_id", "conversation", "prompt")
_FORCING = ("required", "any", "tool", "function", "custom")


@dataclass(frozen=True, slots=True)
class Fields:
    """A request as the encoders read it."""

    api: Api
    body: dict[str, Any]  # a copy: only fields that shape the prompt, none of them null
    effort: int | None  # 1 .. 100; None: answer without thinking
    prefix: bool  # the last message is the assistant's and goes on


def read_fields(api: Api, body: Any, settings: EncodingSettings) -> Fields:
    """Return the prompt's side of a request body. Raises RequestError."""
    if not isinstance(body, Mapping):
        raise RequestError("the request body is not a JSON object")
    taken = {key: body[key] for key in _SHAPING[api] if body.get(key) is not None}
    if api is Api.RESPONSES:
        _refuse_stored(body)
    elif not _messages(taken):
        raise RequestError("messages: wanted a list of at least one message", param="messages")
    effort = _effort(api, body, taken, settings)
    if "output_config" in taken:
        config = taken["output_config"]
        taken["output_config"] = {k: v for k, v in config.items() if k != "effort"}
    if api is Api.CHAT:
        taken["messages"] = [_chat_message(message) for message in taken["messages"]]
        if body.get("continue_final_message") is True and _ends_with_assistant(taken):
            taken["messages"][-1]["prefix"] = True
        prefix = taken["messages"][-1].get("prefix") is True
        earlier = any(message.get("prefix") is True for message in taken["messages"][:-1])
        if earlier or (prefix and not _ends_with_assistant(taken)):
            raise RequestError(
                "prefix: only a last message of the assistant can be continued", param="prefix"
            )
    else:
        prefix = api is Api.MESSAGES and _ends_with_assistant(taken)
    return Fields(api, taken, effort, prefix)


def calls_allowed(body: Mapping[str, Any]) -> bool:
    """Return whether the request declares tools and lets the model call them."""
    return bool(body.get("tools")) and _choice(body) != "none"


def mapping(value: Any, param: str) -> Mapping[str, Any]:
    """Return `value`, {} for none. Raises RequestError where it is no object."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError(f"{param}: wanted an object, found {value!r}", param=param)
    return value


def _effort(
    api: Api, body: Mapping[str, Any], taken: Mapping[str, Any], settings: EncodingSettings
) -> int | None:
    param, value = _named_effort(api, body)
    named = None if value is None else settings.effort_of(value, param)
    thinking = _switch(body)
    forced = _choice(taken) in _FORCING
    if forced and not taken.get("tools"):
        raise RequestError("tool_choice: a call is demanded of no tools", param="tool_choice")
    if forced and thinking:
        raise RequestError(
            "tool_choice: a call can be forced only without thinking; leave tool_choice at auto "
            "or switch thinking off",
            param="tool_choice",
        )
    if thinking is None:
        thinking = settings.default_thinking if named is None else named > 0
        thinking = thinking and not forced
    return (named or settings.default_effort) if thinking else None


def _named_effort(api: Api, body: Mapping[str, Any]) -> tuple[str, Any]:
    if api is Api.MESSAGES:
        return "output_config.effort", mapping(body.get("output_config"), "output_config").get(
            "effort"
        )
    if api is Api.CHAT and body.get("reasoning_effort") is not None:
        return "reasoning_effort", body["reasoning_effort"]
    return "reasoning.effort", mapping(body.get("reasoning"), "reasoning").get("effort")


def _switch(body: Mapping[str, Any]) -> bool | None:
    """Whether thinking is switched on or off outright; None where the request does not say."""
    kind = mapping(body.get("thinking"), "thinking").get("type")
    if kind is not None:
        if kind not in ("enabled", "adaptive", "disabled"):
            raise RequestError(
                f"thinking.type: {kind!r} is none of enabled, adaptive, disabled", param="thinking"
            )
        return bool(kind != "disabled")
    extra = mapping(body.get("chat_template_kwargs"), "chat_template_kwargs")
    for key in ("thinking", "enable_thinking"):
        if isinstance(extra.get(key), bool):
            return bool(extra[key])
    return None


def _choice(body: Mapping[str, Any]) -> Any:
    choice = body.get("tool_choice")
    return choice.get("type") if isinstance(choice, Mapping) else choice


def _refuse_stored(body: Mapping[str, Any]) -> None:
    items = body["input"] if isinstance(body.get("input"), list) else []
    kinds = [item.get("type") for item in items if isinstance(item, Mapping)]
    for key in (*_STORED, "item_reference"):
        if body.get(key) is not None or key in kinds:
            raise RequestError(
                f"{key}: this server stores no responses; send the whole conversation as input",
                param=key,
            )


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = body.get("messages")
    if not isinstance(messages, list):
        return []
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{place}]: wanted an object", param="messages")
    return messages


def _ends_with_assistant(body: Mapping[str, Any]) -> bool:
    return bool(_messages(body)[-1].get("role") == "assistant")


def _chat_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A chat message in the vendor's words."""
    message = dict(message)
    if message.get("role") == "developer":
        message["role"] = "system"
    if message.get("reasoning_content") is None and isinstance(message.get("reasoning"), str):
        message["reasoning_content"] = message.pop("reasoning")
    return message
