"""The turns of a talk, read from any of the three APIs without the recipe library: text only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import RequestError
from .request_fields import Api, Fields, mapping

_TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")


@dataclass(slots=True)
class Turn:
    """What one side said."""

    role: str  # "system", "user" or "assistant"
    text: str
    reasoning: str = ""


def read_turns(fields: Fields, missing: str) -> list[Turn]:
    """Return the turns of a request. Raises RequestError, with `missing` for tools and images."""
    reader = _Reader(missing)
    body = fields.body
    if fields.api is Api.RESPONSES:
        reader.add("system", body.get("instructions"))
        _read_items(reader, body.get("input"))
    else:
        reader.add("system", body.get("system"))
        for message in body["messages"]:
            reader.message(message)
    if not reader.turns:
        raise RequestError("the request says nothing: no message in it")
    return reader.turns


def read_text(content: Any, missing: str) -> str:
    """Return the text of a message's content. Raises RequestError as `read_turns` does."""
    return _Reader(missing).text(content)[0]


def _read_items(reader: _Reader, items: Any) -> None:
    if not isinstance(items, list):
        reader.add("user", items)
        return
    reasoning = ""
    for item in items:
        if not isinstance(item, Mapping):
            raise RequestError("input: wanted a list of objects", param="input")
        kind = item.get("type", "message")
        if kind == "reasoning":
            reasoning = reader.text(item.get("content") or item.get("summary"))[0]
        elif kind == "message":
            reader.message(item)
            if reader.turns and reader.turns[-1].role == "assistant":
                reader.turns[-1].reasoning = reasoning
            reasoning = ""
        else:
            raise reader.refusal(f"input of type {kind!r}")


class _Reader:
    def __init__(self, missing: str) -> None:
        self.turns: list[Turn] = []
        self._missing = missing

    def message(self, message: Mapping[str, Any]) -> None:
        role = message.get("role")
        if role == "developer":
            role = "system"
        if role not in ("system", "user", "assistant") or message.get("tool_calls"):
            raise self.refusal(f"a message of role {role!r}, or with tool calls,")
        self.add(role, message.get("content"))
        said = message.get("reasoning_content")
        if isinstance(said, str) and role == "assistant":
            self.turns[-1].reasoning = said

    def add(self, role: str, content: Any) -> None:
        if content is None and role == "system":
            return
        self.turns.append(Turn(role, *self.text(content)))

    def text(self, content: Any) -> tuple[str, str]:
        """The text and the reasoning of a message's content."""
        if isinstance(content, str):
            return content, ""
        if not isinstance(content, list):
            raise RequestError(f"content: wanted text, found {content!r}", param="messages")
        said: list[str] = []
        thought: list[str] = []
        for part in content:
            kind = mapping(part, "content").get("type")
            if kind == "thinking":
                thought.append(str(part.get("thinking", "")))
            elif kind in _TEXT_PARTS and isinstance(part.get("text"), str):
                said.append(part["text"])
            else:
                raise self.refusal(f"content of type {kind!r}")
        return "\n\n".join(said), "\n\n".join(thought)

    def refusal(self, what: str) -> RequestError:
        return RequestError(f"{what} cannot be read: {self._missing}", param="messages")
