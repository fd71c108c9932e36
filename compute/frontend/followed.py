"""The steps of an answer, and the end of it that is told whatever happens to them.

Invariant: `aclose` cancels the request and tells its end once, even where no step was ever asked
for. A generator could not: one that was never begun runs nothing when it is closed, and a client
may leave before the first event.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from protocol.errors import HeadraceError

from .answer import Answer, Moved, Piece
from .http.errors import ApiError


class Followed(AsyncIterator[Moved | Piece]):
    """Iterates over an answer's steps; to be closed.

    ended   told how it ended: by the reason it finished with, "error" or "left"
    """

    def __init__(self, answer: Answer, ended: Callable[[str], None]) -> None:
        self._answer = answer
        self._ended = ended
        self._steps = answer.steps()
        self._is_over = False

    async def __anext__(self) -> Moved | Piece:
        """Return the next step. Raises ApiError, HeadraceError where compute fails."""
        try:
            return await anext(self._steps)
        except StopAsyncIteration:
            finished = self._answer.finished
            await self._end("stop" if finished is None else finished.reason)
            raise
        except (ApiError, HeadraceError):
            await self._end("error")
            raise

    async def aclose(self) -> None:
        """Leave the answer where it has not ended."""
        await self._end("left")

    async def _end(self, how: str) -> None:
        if self._is_over:
            return
        self._is_over = True
        await self._steps.aclose()
        self._answer.cancel()
        self._ended(how)
