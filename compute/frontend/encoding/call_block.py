"""A block of tool calls, read as the model writes it.

It is fed with text and with the DSML marker, which is known by its id, never by its spelling. So a
value may hold every spelled tag. `</` and the marker always end an open value; `<` and the marker
do not. Any spacing between tags is accepted, and so are tags without the space after the marker,
a call without the outer tag and a call that its successor ends. After the outer end tag
everything is ignored. Source: model specification, section 11, Output.

Invariant: the joined events do not depend on how the text is cut.
"""

from __future__ import annotations

import re

from .call_arguments import CallArguments
from .events import ArgumentsDelta, CallEnded, CallStarted, Event

_CALL = re.compile(r'\s*invoke\s+name\s*=\s*"([^"]*)"[^>]*>')
_CALL_NAMED = re.compile(r'\s*invoke\s+name\s*=\s*"([^"]*)"')
_CALL_SO_FAR = re.compile(r'[^>"]*("[^"]*("[^>]*)?)?')
_NAME = r'\s*parameter\s+name\s*=\s*"(.*?)"'
_PARAMETER = re.compile(_NAME + r'\s+string\s*=\s*"([^"<>]*)"\s*>', re.DOTALL)
_UNFLAGGED = re.compile(_NAME + r"\s*>(.*)", re.DOTALL)
_NAMED = re.compile(_NAME + r'\s+string\s*=\s*"', re.DOTALL)
_WORD = re.compile(r"\s*(\w+)")
_OUTER = ("calls", "tool_calls")


class CallBlock:
    """Events of one block.

    marker   the marker's spelling, for values that hold it
    """

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._tail = ""  # the end of the last text: "", "<" or "</"
        self._tag: str | None = None  # text after the marker of a tag that is not complete
        self._closing = False  # whether that tag is an end tag
        self._ends_value = False  # whether it has ended a value, so that it may be a parameter's
        self._call: CallArguments | None = None
        self._name = ""
        self._events: list[Event] = []
        self.n_calls = 0
        self.closed = False  # the outer end tag has been read

    def text(self, text: str) -> list[Event]:
        """Return the events of more text."""
        while text and not self.closed:
            if self._tag is None:
                self._outside_tags(text)
                text = ""
            else:
                self._tag += text
                text = self._complete() if ">" in text else ""
        return self._taken()

    def marker(self) -> list[Event]:
        """Return the events of the DSML marker."""
        if self.closed:
            return []
        tail = _tag_begin(self._tag or "") or self._tail
        self._tail = ""
        if self._call is not None and self._call.is_open:
            self._marker_in_value(tail)
        elif tail:
            if self._tag is not None:
                self._give_up(self._tag.removesuffix(tail), tail)
            if not self.closed:
                self._tag, self._closing, self._ends_value = "", tail == "</", False
        elif self._tag is not None:
            self._tag += self._marker
        return self._taken()

    def finish(self) -> list[Event]:
        """Return the events at the end of the output."""
        in_end_tag = self._tag is not None and self._closing
        if self._tag is not None and not self._closing and not self.closed:
            self._cut_head(self._tag)
        if self._call is not None:
            if self._call.is_open:
                self._send(self._call.add(self._tail))
            self._end_call(complete=in_end_tag and not self._ends_value)
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _outside_tags(self, text: str) -> None:
        text = self._tail + text
        self._tail = _tag_begin(text)
        if self._call is not None and self._call.is_open:
            self._send(self._call.add(text[: len(text) - len(self._tail)]))

    def _marker_in_value(self, tail: str) -> None:
        assert self._call is not None
        if tail == "</":
            self._send(self._call.close())
            self._tag, self._closing, self._ends_value = "", True, True
        else:
            self._send(self._call.add(tail + self._marker))

    def _complete(self) -> str:
        """Act on the tag where it is complete; return the text after it."""
        tag = self._tag or ""
        if self._closing:
            head, found, rest = tag.partition(">")
            if not found:
                return ""
            self._end_tag(head)
            return self._after(rest)
        word = _WORD.match(tag)
        if word is None:
            return self._after(tag)
        if word[1] == "invoke":
            return self._open_call(tag)
        if word[1] == "parameter" and self._call is not None:
            return self._open_value(tag)
        _, found, rest = tag.partition(">")
        return self._after(rest) if found else ""

    def _after(self, rest: str) -> str:
        self._tag = None
        return rest

    def _open_call(self, tag: str) -> str:
        found = _CALL.match(tag)
        if found is None:
            so_far = _CALL_SO_FAR.match(tag)
            assert so_far is not None
            return "" if so_far.end() == len(tag) else self._after(tag[so_far.end() + 1 :])
        self._start_call(found[1])
        return self._after(tag[found.end() :])

    def _start_call(self, name: str) -> None:
        if self._call is not None:
            self._end_call(complete=True)
        self._call, self._name = CallArguments(), name
        self._events.append(CallStarted(self.n_calls, name))
        self.n_calls += 1

    def _open_value(self, tag: str) -> str:
        found = _PARAMETER.match(tag)
        if found is None:
            return ""
        assert self._call is not None
        self._send(self._call.open(found[1], found[2]))
        return self._after(tag[found.end() :])

    def _cut_head(self, tag: str) -> None:
        """The output ends inside the head of a call or a parameter; its name may be known."""
        call, parameter = _CALL_NAMED.match(tag), _NAMED.match(tag)
        if call is not None:
            self._start_call(call[1])
        elif parameter is not None and self._call is not None:
            self._send(self._call.open(parameter[1], ""))

    def _give_up(self, tag: str, tail: str) -> None:
        """Another tag begins where `tag` is not complete: a parameter without a flag has ended."""
        if self._closing:
            self._end_tag(tag)
            return
        found = _UNFLAGGED.match(tag)
        if tail == "</" and found is not None and self._call is not None:
            self._send(self._call.open(found[1], ""))
            self._call.add(found[2])
            self._send(self._call.close())

    def _end_tag(self, head: str) -> None:
        word = _WORD.match(head)
        name = "" if word is None else word[1]
        if self._call is not None and name in ("invoke", *_OUTER):
            self._end_call(complete=True)
        self.closed = name in _OUTER

    def _end_call(self, *, complete: bool) -> None:
        assert self._call is not None
        self._send(self._call.end() if complete else self._call.cut())
        arguments = self._call.final if complete else self._call.sent
        self._events.append(CallEnded(self.n_calls - 1, self._name, arguments, complete))
        self._call = None

    def _send(self, text: str) -> None:
        if text:
            self._events.append(ArgumentsDelta(self.n_calls - 1, text))


def _tag_begin(text: str) -> str:
    """What a tag begins with, where `text` ends in it."""
    return next((begin for begin in ("</", "<") if text.endswith(begin)), "")
