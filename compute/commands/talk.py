"""A talk with the model: what was said, the prompt of the next turn, and the answer as it comes.

Prompts are those of Chat Completions requests, made by the frontend's own encoding, so that the
same talk has the same prompt here and over HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from compute.frontend.encoding import (
    Encoding,
    Event,
    Prompt,
    ReasoningDelta,
    RequestError,
    TextDelta,
)
from compute.frontend.encoding.output_parser import OutputParser
from compute.frontend.text_stream import TextStream
from protocol.errors import ConfigError


@dataclass(slots=True)
class Talk:
    """The turns so far.

    think    None: as the settings say where a request does not
    effort   of thinking: a number from 1 to 100 or a name; None: as the settings say
    """

    encoding: Encoding
    system: str | None = None
    think: bool | None = None
    effort: int | str | None = None
    turns: list[tuple[str, str]] = field(default_factory=list)  # (line, answer)

    def prompt(self, line: str) -> Prompt:
        """Return the prompt of all turns and of `line`. Raises ConfigError."""
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for said, answer in self.turns:
            messages.append({"role": "user", "content": said})
            messages.append({"role": "assistant", "content": answer})
        body: dict[str, Any] = {"messages": [*messages, {"role": "user", "content": line}]}
        if self.think is not None:
            body["thinking"] = {"type": "enabled" if self.think else "disabled"}
        if self.effort is not None:
            body["reasoning_effort"] = self.effort
        try:
            return self.encoding.chat(body)
        except RequestError as error:
            raise ConfigError(str(error)) from None

    def answer(
        self, prompt: Prompt, stops: Sequence[str], thought: Callable[[str], None]
    ) -> SpokenText:
        """Return what reads the answer to a prompt."""
        return SpokenText(self.encoding, prompt, stops, thought)


class SpokenText(TextStream):
    """The text of an answer, without its markers and thoughts.

    thought   called with more of the reasoning as it comes
    """

    def __init__(
        self,
        encoding: Encoding,
        prompt: Prompt,
        stops: Sequence[str],
        thought: Callable[[str], None],
    ) -> None:
        super().__init__(encoding.tokenizer)
        self._parser: OutputParser = encoding.parser(prompt, stops)
        self._thought = thought
        self.reasoning = ""
        self.said = ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string or the end token has ended it."""
        return self._parser.stopped

    def add(self, token_id: int) -> str:
        """Return the text that can be shown now."""
        return self._shown(self._parser.add(token_id))

    def finish(self) -> str:
        """Return the rest: no id follows."""
        return self._shown(self._parser.finish())

    def _shown(self, events: Sequence[Event]) -> str:
        """Take events in: thoughts are told, text is returned."""
        text = ""
        for event in events:
            if isinstance(event, ReasoningDelta):
                self.reasoning += event.text
                self._thought(event.text)
            elif isinstance(event, TextDelta):
                if event.text and self.reasoning and not self.said + text:
                    self._thought("\n\n")
                text += event.text
        self.said += text
        return text
