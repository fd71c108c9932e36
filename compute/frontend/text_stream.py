"""A request's text as it comes: ids in, characters that may be shown out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .stop_strings import StopStrings

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


class TextStream:
    """Decodes ids one at a time and ends at the first stop string.

    special   True: special tokens appear as they are spelled
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, special: bool = False
    ) -> None:
        self._decoder = tokenizer.decoder(special=special)
        self._stops = StopStrings(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has been completed."""
        return self._stops.found is not None

    @property
    def stop(self) -> str | None:
        """The stop string that was completed."""
        return self._stops.found

    def add(self, token_id: int) -> str:
        """Return the text that can be shown now."""
        return self._stops.feed(self._decoder.add(token_id))

    def finish(self) -> str:
        """Return the rest: no id follows."""
        rest = self._stops.feed(self._decoder.finish())
        return rest + self._stops.finish()
