"""The parser of every command line: what it does not know it names, with the nearest it knows.

argparse takes the value of a mistyped flag for a positional argument, and then blames that one, or
the whole program. Here flags are looked at first, by the parser whose command it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from .wording import nearest

MAX_USAGE_LINES = 6  # that are shown above an error
_ANY_NUMBER = ("?", "*", "+")


class FlagParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors name the unknown flag and the nearest one, under its usage.

    A flag is never abbreviated, and what a command does not know is its own error: sub-parsers are
    of this class too.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **settings})
        self._commands: argparse.Action | None = None

    def add_subparsers(self, **settings: Any) -> Any:
        """Add commands, whose parsers are of this class."""
        self._commands = super().add_subparsers(**settings)
        return self._commands

    def parse_known_args(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse, and end with an error of this command where something is not known to it."""
        if args is not None:
            self._refuse_unknown(list(args))
        found, extras = super().parse_known_args(args, namespace)
        if extras:
            self.error(f"one argument too many: {extras[0]!r}")
        return found, extras

    def error(self, message: str) -> NoReturn:
        """End with status 2 and a message, below the usage; many flags are left to --help."""
        usage = self.format_usage()
        if usage.count("\n") > MAX_USAGE_LINES:
            formatter = self._get_formatter()
            formatter.add_usage(None, self._get_positional_actions(), [])
            usage = formatter.format_help().replace(self.prog, f"{self.prog} [flags]", 1)
            message = f"{message}\n{self.prog} --help tells of all flags"
        self.exit(2, f"{usage}{self.prog}: error: {message}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action is self._commands and action.choices and value not in action.choices:
            what = str(action.metavar or "argument").lower()
            self.error(f"there is no {what} {value!r}{self._meant(value, action.choices)}")
        super()._check_value(action, value)

    def _refuse_unknown(self, words: list[str]) -> None:
        """End with an error at the first flag that is not known."""
        place = 0
        while place < len(words) and words[place] != "--":
            word = words[place]
            place += 1
            if self._is_flag(word):
                name, _, value = word.partition("=")
                known = self._option_string_actions.get(name)
                if known is None:
                    self._refuse(name)
                elif not value:
                    place += self._n_values(known, words[place:])
            elif self._commands is not None:
                return  # the rest is a command's, whose parser looks at it

    def _is_flag(self, word: str) -> bool:
        is_number = self._negative_number_matcher.match(word) is not None
        return len(word) > 1 and word[0] == "-" and " " not in word and not is_number

    def _n_values(self, action: argparse.Action, following: list[str]) -> int:
        """How many of the words that follow a flag are its values."""
        if action.nargs is None:
            return 1
        if isinstance(action.nargs, int):
            return action.nargs
        if action.nargs not in _ANY_NUMBER:
            return len(following)
        flags = (place for place, word in enumerate(following) if self._is_flag(word))
        return min(next(flags, len(following)), 1 if action.nargs == "?" else len(following))

    def _refuse(self, name: str) -> NoReturn:
        self.error(f"there is no flag {name}{self._meant(name, self._option_string_actions)}")

    @staticmethod
    def _meant(name: str, known: Iterable[str]) -> str:
        near = nearest(name, known)
        return f"; did you mean {near}?" if near else ""
