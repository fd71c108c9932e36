"""The arguments of one tool call, written as JSON while the model gives them."""

from __future__ import annotations

from .json_text import escaped, quoted, value_text


class CallArguments:
    """Turns parameters into the text of a JSON object.

    Strings stream as they come. Other values wait for their end, and what is no JSON then becomes
    a string. A name that comes again replaces its earlier value in `final`.
    """

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._name = ""
        self._is_string: bool | None = None
        self._pieces: list[str] | None = None  # of the open value; of a string already escaped
        self._sent: list[str] = []

    @property
    def is_open(self) -> bool:
        """Whether a value has begun and not ended."""
        return self._pieces is not None

    def open(self, name: str, flag: str) -> str:
        """Begin the value of `name`; returns the text to send.

        flag   what stood in `string=`: "true" a string, "false" JSON, else JSON if it is
        """
        assert self._pieces is None
        lead = ", " if self._sent else "{"
        self._name, self._pieces = name, []
        self._is_string = flag.lower() == "true"
        return self._send(f"{lead}{quoted(name)}: " + ('"' if self._is_string else ""))

    def add(self, text: str) -> str:
        """Return what to send of more of the value."""
        assert self._pieces is not None
        if not self._is_string:
            self._pieces.append(text)
            return ""
        inside = escaped(text)
        self._pieces.append(inside)
        return self._send(inside)

    def close(self) -> str:
        """Return what to send at the end of the value."""
        assert self._pieces is not None
        text = "".join(self._pieces)
        self._pieces = None
        if self._is_string:
            self._values[self._name] = f'"{text}"'
            return self._send('"')
        self._values[self._name] = value_text(text)
        return self._send(self._values[self._name])

    def end(self) -> str:
        """Return what to send at the end of a complete call."""
        return self._send("}" if self._sent else "{}")

    def cut(self) -> str:
        """Return what to send where the output ends inside the call."""
        if self._pieces is None or self._is_string:
            return ""
        return self._send("".join(self._pieces))

    @property
    def final(self) -> str:
        """The JSON object of a complete call, each name once."""
        return "{" + ", ".join(f"{quoted(k)}: {v}" for k, v in self._values.items()) + "}"

    @property
    def sent(self) -> str:
        """All text sent so far."""
        return "".join(self._sent)

    def _send(self, text: str) -> str:
        self._sent.append(text)
        return text
