"""Write windows: the one MissRequest or Stream that is being served, and the last ones that were.

A window is open from the request until its final answer. The slots of its `kept` keys and its
`busy` slots are what the daemon may not take meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from protocol.wire.fields import shown

from .outcome import KeyFault, RequestRefused, TableChanges, WindowAnswer

REMEMBERED = 16


@dataclass(slots=True)
class Window:
    """A MissRequest and how far it is."""

    request: int
    layer: int
    experts: tuple[int, ...]
    keys: tuple[int, ...]
    busy: frozenset[int]
    applied: int
    key_set: frozenset[int] = field(init=False)
    unplaced: list[int] = field(default_factory=list)  # no slot found yet
    reading: set[int] = field(default_factory=set)
    started: set[int] = field(default_factory=set)  # read for this request
    faults: dict[int, tuple[str, str]] = field(default_factory=dict)
    n_hits: int = 0
    n_adopted: int = 0
    is_answered: bool = False  # its owner has sent the answer already

    def __post_init__(self) -> None:
        self.key_set = frozenset(self.keys)

    @property
    def kept(self) -> AbstractSet[int]:
        """Keys whose slots may not be taken."""
        return self.key_set

    @property
    def complete(self) -> bool:
        """Whether each key has its slot or its fault."""
        return not self.unplaced and not self.reading

    def begin(self, key: int) -> None:
        """`key` is being read for this request."""
        self.reading.add(key)
        self.started.add(key)

    def adopt(self, key: int) -> None:
        """`key` is being read for somebody else."""
        self.reading.add(key)
        self.n_adopted += 1

    def landed(self, key: int, fault: tuple[str, str] | None) -> None:
        """The read of `key` returned; `fault` is (code, text) where without its bytes."""
        if key not in self.reading:
            return
        self.reading.remove(key)
        if fault is not None:
            self.faults[key] = fault

    def refuse_unplaced(self, code: str, text: str) -> int:
        """Every key without a slot fails; returns how many."""
        n = len(self.unplaced)
        self.faults.update(dict.fromkeys(self.unplaced, (code, text)))
        self.unplaced.clear()
        return n

    def refuse_reading(self, code: str, text: str) -> None:
        """Every key that is still being read fails."""
        self.faults.update(dict.fromkeys(self.reading, (code, text)))
        self.reading.clear()

    def answer(self, slot_of: dict[int, int], table: TableChanges) -> WindowAnswer:
        """The final answer, keys that have left since their slot was found included as faults."""
        slots: list[int] = []
        errors: list[KeyFault] = []
        for expert, key in zip(self.experts, self.keys, strict=True):
            fault = self.faults.get(key)
            slot = -1 if fault else slot_of.get(key, -1)
            slots.append(slot)
            if slot < 0:
                left = ("NO_SLOT", f"layer {self.layer} expert {expert}: evicted since the answer")
                errors.append(KeyFault(self.layer, expert, *(fault or left)))
        return WindowAnswer(
            request=self.request,
            layer=self.layer,
            experts=self.experts,
            slots=tuple(slots),
            table=table,
            errors=tuple(errors),
            n_hits=self.n_hits,
            n_loaded=len(self.started - self.faults.keys()),
            n_adopted=self.n_adopted,
        )


class WindowDesk:
    """The open window, if any, and the last answered ones by number."""

    def __init__(self) -> None:
        self.open: Window | None = None
        self._answered: OrderedDict[int, Window] = OrderedDict()
        self._highest = 0
        self.last_keys: frozenset[int] = (
            frozenset()
        )  # of the last answer; the engine wants them now

    def new_session(self) -> None:
        """Numbers begin anew."""
        assert self.open is None, "a window is open"
        self._answered.clear()
        self._highest = 0
        self.last_keys = frozenset()

    def known(self, request: int) -> Window | None:
        """The window of this number, open or remembered."""
        if self.open is not None and self.open.request == request:
            return self.open
        return self._answered.get(request)

    def expects(self, request: int) -> bool:
        """Whether a window of this new number may be opened now."""
        return self.open is None and request > self._highest

    def check_new(self, request: int) -> None:
        """Raise RequestRefused where a window of this new number may not be opened now."""
        if self.open is not None:
            text = f"request {request}: the window of request {self.open.request} is open"
            raise RequestRefused("limit", text)
        if request <= self._highest:
            text = f"request {request}: wanted a number above {self._highest}"
            raise RequestRefused("stale", text)

    def start(self, window: Window) -> None:
        """Open it."""
        self.open = window
        self._highest = window.request

    def close(self, window: Window) -> None:
        """Close the open window and remember it."""
        assert window is self.open, "not the open window"
        self.open = None
        self.last_keys = frozenset(window.kept)
        self._answered[window.request] = window
        if len(self._answered) > REMEMBERED:
            self._answered.popitem(last=False)


def check_same(window: Window, layer: int, experts: Sequence[int]) -> None:
    """Raise RequestRefused where a repeated request asks for something else than before."""
    if (window.layer, window.experts) != (layer, tuple(experts)):
        text = (
            f"request {window.request}: layer {layer} {len(experts)} experts "
            f"{shown(tuple(experts))}, was layer {window.layer} {len(window.experts)} experts "
            f"{shown(window.experts)} under the same number"
        )
        raise RequestRefused("malformed", text)
