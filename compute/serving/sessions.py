"""The frontends that have joined, by their route on the ROUTER socket and by number."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field

MAX_SESSIONS = 64


@dataclass(slots=True)
class Session:
    """One frontend. It ends with its life connection."""

    number: int
    route: bytes
    pid: int
    joined: float = field(default_factory=time.monotonic)
    is_attached: bool = False
    parts: dict[int, list[int]] = field(default_factory=dict)  # prompts that are not whole yet

    @property
    def n_part_ids(self) -> int:
        """Token ids of prompts that are not whole yet."""
        return sum(map(len, self.parts.values()))


class Sessions:
    """All sessions of this process; a number is never given twice."""

    def __init__(self) -> None:
        self.by_route: dict[bytes, Session] = {}
        self.by_number: dict[int, Session] = {}
        self._numbers = itertools.count(1)

    def add(self, route: bytes, pid: int) -> Session | None:
        """Begin a session; None where there are too many."""
        if len(self.by_number) >= MAX_SESSIONS:
            return None
        session = Session(next(self._numbers), route, pid)
        self.by_route[route] = self.by_number[session.number] = session
        return session

    def remove(self, session: Session) -> None:
        """End a session."""
        self.by_number.pop(session.number, None)
        if self.by_route.get(session.route) is session:
            del self.by_route[session.route]
