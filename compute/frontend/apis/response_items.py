"""The output items of a response: reasoning, a message, function calls; one is open at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compute.frontend.answer import Piece, TokenChance
from compute.frontend.encoding import (
    ArgumentsDelta,
    CallEnded,
    CallStarted,
    Event,
    ReasoningDelta,
    TextDelta,
)
from compute.frontend.service import new_id
from compute.frontend.tokenizer import Tokenizer

from .chances import chat_chances

Told = tuple[str, dict[str, Any]]  # an event's type and its fields


class Items:
    """Items as they come; what `take` and `end` return are the events of a stream."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.done: list[dict[str, Any]] = []
        self.namespaces: Mapping[str, tuple[str, str]] = {}  # full name -> (namespace, name)
        self._tokenizer = tokenizer
        self._open: dict[str, Any] = {}
        self._chances: list[TokenChance] = []  # of text that was held back
        self._told: list[Told] = []

    def take(self, piece: Piece) -> list[Told]:
        """Go on with a piece of the answer."""
        self._chances += piece.chances
        for event in piece.events:
            self._event(event)
        return self._taken()

    def end(self, *, cut: bool) -> list[Told]:
        """Close what is open: the answer is over, or was cut off."""
        self._close("incomplete" if cut else "completed")
        return self._taken()

    def _taken(self) -> list[Told]:
        told, self._told = self._told, []
        return told

    def _event(self, event: Event) -> None:
        if isinstance(event, ReasoningDelta):
            self._into("reasoning")
            self._open["content"][0]["text"] += event.text
            self._part("response.reasoning_text.delta", delta=event.text)
        elif isinstance(event, TextDelta):
            self._into("message")
            self._text(event.text)
        elif isinstance(event, CallStarted):
            self._close()
            self._begin_call(event.name)
        elif isinstance(event, ArgumentsDelta):
            self._open["arguments"] += event.text
            self._item("response.function_call_arguments.delta", delta=event.text)
        elif isinstance(event, CallEnded):
            self._open["arguments"] = event.arguments
            self._close("completed" if event.complete else "incomplete")

    def _text(self, text: str) -> None:
        chances, self._chances = self._chances, []
        entries = chat_chances(chances, self._tokenizer)
        part = self._open["content"][0]
        part["text"] += text
        part["logprobs"] += entries
        self._part("response.output_text.delta", delta=text, logprobs=entries)

    def _into(self, kind: str) -> None:
        """Open an item of reasoning or a message where none of its kind is open."""
        if self._open.get("type") == kind:
            return
        self._close()
        if kind == "reasoning":
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            item: dict[str, Any] = {"id": new_id("rs_"), "type": kind, "summary": []}
        else:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": new_id("msg_"), "type": kind, "role": "assistant"}
        item |= {"status": "in_progress", "content": []}
        self._tell("response.output_item.added", item=dict(item))
        self._open = item | {"content": [part]}
        self._part("response.content_part.added", part=_copy(part))

    def _begin_call(self, full_name: str) -> None:
        namespace, name = self.namespaces.get(full_name, ("", full_name))
        self._open = {
            "id": new_id("fc_"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": new_id("call_"),
            "name": name,
            "arguments": "",
        }
        if namespace:
            self._open["namespace"] = namespace
        self._tell("response.output_item.added", item=dict(self._open))

    def _close(self, status: str = "completed") -> None:
        item, kind = self._open, self._open.get("type")
        if not item:
            return
        if kind == "function_call":
            self._item(
                "response.function_call_arguments.done",
                arguments=item["arguments"],
                name=item["name"],
            )
        else:
            part = item["content"][0]
            if kind == "reasoning":
                self._part("response.reasoning_text.done", text=part["text"])
            else:
                logprobs = list(part["logprobs"])
                self._part("response.output_text.done", text=part["text"], logprobs=logprobs)
            self._part("response.content_part.done", part=_copy(part))
        item["status"] = status
        self._tell("response.output_item.done", item=item)
        self.done.append(item)
        self._open = {}

    def _part(self, kind: str, **fields: Any) -> None:
        self._item(kind, content_index=0, **fields)

    def _item(self, kind: str, **fields: Any) -> None:
        self._tell(kind, item_id=self._open["id"], **fields)

    def _tell(self, kind: str, **fields: Any) -> None:
        self._told.append((kind, {"output_index": len(self.done), **fields}))


def _copy(part: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, list) else value for name, value in part.items()}
