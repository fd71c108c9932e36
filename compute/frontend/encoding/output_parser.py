"""The model's output, read token by token: reasoning, text, tool calls.

Markers are known by their ids, so whatever is merely spelled like one stays text. No marker ever
shows in reasoning or text: think markers switch or vanish, the end token ends, `<` with the DSML
marker opens a block of calls, after which nothing is text. Inside the value of a call's argument
every marker but the end token is kept as it is spelled. Newlines around reasoning, before the text
and before a block are dropped. Source: model specification, section 11, Output.

The recipe library has such a parser too, and the tests compare with it. It is not used, because
it cuts names and passes on values that are no JSON before anybody could mend them, and because
plain talk must be read without it.

Invariant: the joined deltas and all other events do not depend on how the output is cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING

from compute.frontend.stop_strings import StopStrings

from .call_block import CallBlock
from .events import Event, Finished, ReasoningDelta, TextDelta, merged
from .prompt import Prompt, Start

if TYPE_CHECKING:
    from compute.frontend.tokenizer import Tokenizer

_STRAY_TAG = re.compile(r"\s*\w*\s*>")
_STRAY_TAG_SO_FAR = re.compile(r"\s*\w*\s*")


class _State(Enum):
    REASONING = auto()
    TEXT = auto()
    CALLS = auto()
    HIDDEN = auto()  # a block of calls that the request does not allow
    OVER = auto()


class OutputParser:
    """Events of one answer.

    start         where the output begins
    parse_calls   False: a block of calls is read over instead of reported
    stops         strings that end the text; reasoning and calls are not searched
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        start: Start = Start.TEXT,
        *,
        parse_calls: bool = True,
        stops: Sequence[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._special = tokenizer.special
        self._markers = tokenizer.special.present()
        self._decoder = tokenizer.decoder(special=True)
        self._stops = StopStrings(stops)
        self._parse_calls = parse_calls
        self._block = CallBlock(self._spelling(self._special.dsml))
        self._held = ""  # newlines and the begin of a tag: text unless a block follows
        self._stray: str | None = None  # text after `</` and the marker, outside a block
        self._drop_newlines = start in (Start.TEXT, Start.REASONING)
        self._may_think = start is Start.TEXT  # a think marker that comes first opens reasoning
        if start is Start.CALLS:
            self._state = _State.CALLS
        elif start in (Start.REASONING, Start.REASONING_CONTINUED):
            self._state = _State.REASONING
        else:
            self._state = _State.TEXT

    @classmethod
    def after(cls, prompt: Prompt, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> OutputParser:
        """Return the parser of the answer to `prompt`; `stops` are the request's own."""
        both = (*stops, *prompt.stops)
        return cls(tokenizer, prompt.start, parse_calls=prompt.parse_calls, stops=both)

    @property
    def stopped(self) -> bool:
        """Whether the answer is over: by its end token or a stop string."""
        return self._state is _State.OVER

    def add(self, token_id: int) -> list[Event]:
        """Return the events of one token."""
        return merged(self._token(token_id))

    def feed(self, token_ids: Iterable[int]) -> list[Event]:
        """Return the events of several tokens."""
        return merged(event for token_id in token_ids for event in self._token(token_id))

    def finish(self, *, cut: bool = False) -> list[Event]:
        """Return the last events, `Finished` among them.

        cut   the token limit or the context ended the output, not the model
        """
        cut = cut and not self.stopped
        events = self._end()
        if self._stops.found is not None:
            finished = Finished("stop", self._stops.found)
        elif cut:
            finished = Finished("length")
        else:
            finished = Finished("tool_calls" if self._block.n_calls else "stop")
        return merged([*events, finished])

    def _token(self, token_id: int) -> list[Event]:
        if self._state is _State.OVER:
            return []
        if token_id not in self._markers:
            return self._text(self._decoder.add(token_id))
        if token_id == self._special.end:
            return self._end()
        events = self._text(self._decoder.finish())
        if self._state is _State.CALLS:
            if token_id == self._special.dsml:
                return events + self._block.marker()
            return events + self._block.text(self._spelling(token_id))
        if self._state in (_State.REASONING, _State.TEXT):
            return events + self._marker(token_id)
        return events

    def _text(self, text: str) -> list[Event]:
        if self._state is _State.CALLS:
            return self._block.text(text)
        if not text or self._state in (_State.HIDDEN, _State.OVER):
            return []
        if self._stray is not None:
            self._stray += text
            if _STRAY_TAG_SO_FAR.fullmatch(self._stray):
                return []
            text, self._stray = self._stray, None
            found = _STRAY_TAG.match(text)
            text = text[found.end() :] if found else text
        return self._outside_calls(text)

    def _outside_calls(self, text: str) -> list[Event]:
        text = self._held + text
        if self._drop_newlines:
            text = text.lstrip("\n")
            self._drop_newlines = not text
        if text:
            self._may_think = False
        tag = next((end for end in ("</", "<") if text.endswith(end)), "")
        sure = text[: len(text) - len(tag)].rstrip("\n")
        self._held = text[len(sure) :]
        return self._shown(sure)

    def _shown(self, text: str) -> list[Event]:
        if self._state is _State.REASONING:
            return [ReasoningDelta(text)]
        text = self._stops.feed(text)
        if self._stops.found is not None:
            self._state = _State.OVER
        return [TextDelta(text)]

    def _marker(self, token_id: int) -> list[Event]:
        """A marker outside a block of calls."""
        special = self._special
        events: list[Event] = []
        if self._stray is not None:
            stray, self._stray = self._stray, None
            events = self._outside_calls(stray)
        if token_id == special.dsml and self._held.endswith("</"):
            self._held, self._stray = self._held[:-2], ""
        elif token_id == special.dsml and self._held.endswith("<"):
            events += self._open_block()
        elif self._held.endswith(("<", "</")):
            events += self._release()
        if token_id == special.think_end and self._state is _State.REASONING:
            self._held = ""
            self._state, self._drop_newlines = _State.TEXT, True
        elif token_id == special.think and self._may_think:
            self._state, self._drop_newlines = _State.REASONING, True
        self._may_think = False
        return events

    def _open_block(self) -> list[Event]:
        rest = self._stops.finish() if self._state is _State.TEXT else ""
        self._held = ""
        if not self._parse_calls:
            self._state = _State.HIDDEN
            return [TextDelta(rest)]
        self._state = _State.CALLS
        return [TextDelta(rest), *self._block.text("<"), *self._block.marker()]

    def _release(self) -> list[Event]:
        held, self._held = self._held, ""
        return self._shown(held)

    def _end(self) -> list[Event]:
        """The events of what was held back; the answer is over."""
        if self._state is _State.OVER:
            return []
        events = self._text(self._decoder.finish())
        if self._state is _State.CALLS:
            events += self._block.finish()
        elif self._state is not _State.HIDDEN:
            events += self._release()
            if self._state is _State.TEXT:
                events.append(TextDelta(self._stops.finish()))
        self._state = _State.OVER
        return events

    def _spelling(self, token_id: int | None) -> str:
        return "" if token_id is None else self._tokenizer.decode([token_id], special=True)
