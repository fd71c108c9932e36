"""The keys in the arena, hottest first: what a cold machine is to load.

Written from the slot headers, by whatever thread: a header that changes meanwhile puts one key in
the wrong place, no more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.arena.layout import SlotState

from .model_state import ModelState

NAME = "hot"
KEY = np.dtype([("layer", "<u2"), ("expert", "<u2")])


def hottest_first(headers: NDArray[Any]) -> NDArray[Any]:
    """Return the READY keys, KEY [n], by falling score, then by last use."""
    ready = headers[headers["state"] == SlotState.READY]
    keys = np.empty(len(ready), KEY)
    keys["layer"], keys["expert"] = ready["layer"], ready["expert"]
    return keys[np.lexsort((ready["last_use"], ready["score"]))[::-1]]


class HotList:
    """The list in the state directory, as it was last written."""

    def __init__(self, state: ModelState, headers: NDArray[Any]) -> None:
        self._state = state
        self._headers = headers
        self._written: bytes | None = None

    def save(self) -> None:
        """Write the list where it has changed and is not empty: an empty arena knows nothing."""
        if not self._state.may_save:
            return
        content = hottest_first(self._headers.copy()).tobytes()
        if content and content != self._written and self._state.write(NAME, content):
            self._written = content


def read_hot_list(state: ModelState) -> NDArray[Any]:
    """Return the saved list, KEY [n], hottest first; empty where there is none."""
    content = state.read(NAME, stamped=False) or b""
    return np.frombuffer(content[: len(content) // KEY.itemsize * KEY.itemsize], KEY)
