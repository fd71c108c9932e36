"""What an engine tells the slot cache: windows, streams, acknowledgements, uses, advice.

The half of SlotCache that the one engine drives; cache.py says what must hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .cache_parts import CacheParts, Engine
from .outcome import RequestRefused, TableChanges
from .serving import Serving
from .stream_window import StreamWindow
from .windows import Window, check_same


class EngineEvents:
    """Event methods of the engine; after each one the owner calls `drain`."""

    def __init__(self, parts: CacheParts) -> None:
        """Take parts whose slots are in a consistent state."""
        self._parts = parts
        self._book = parts.book
        self._windows = parts.windows
        self._serving = Serving(parts)
        self.counters = parts.counters

    def engine_attached(self) -> None:
        """An engine was sent Welcome (the whole table at `table_version`); nothing acked yet."""
        self._serving.new_session("another engine came")
        self._parts.retired.new_engine()
        self._parts.engine = Engine.ATTACHED
        self._serving.settle()

    def engine_gone(self) -> None:
        """No engine reads the arena: the window closes unanswered, RETIRING slots are FREE.

        Reads under way go on and publish.
        """
        self._serving.new_session("the engine is gone")
        self._parts.engine = Engine.NONE
        self._serving.settle()

    def resync(self) -> None:
        """The engine gets the whole table: an open window closes unanswered (the table says all).

        Acknowledges nothing; the engine's next `applied` does.
        """
        self._serving.close_early("the engine asked for the whole table")
        self._serving.settle()

    def open_window(
        self,
        request: int,
        step: int,
        layer: int,
        experts: Sequence[int],
        busy: Sequence[int],
        applied: int,
        epoch_done: int,
        epoch_launched: int = 0,
        *,
        is_answered: bool = False,
    ) -> None:
        """Serve a MissRequest: hits, loads in flight adopted, loads begun. Acknowledges too.

        Its one WindowAnswer comes out of `drain`, at once where all are hits. The same number
        again: nothing while the window is open, else the same answer with the changes since.
        Raises RequestRefused where another window is open, for a number that is older than the
        remembered ones or reused with other experts, or for an `applied` from the future.

        is_answered  what `foretell` said was sent: no answer comes
        """
        keys = self._keys(layer, experts)
        window = Window(request, layer, tuple(experts), keys, frozenset(busy), applied)
        window.is_answered = is_answered
        self._open(window, step, epoch_done, epoch_launched)

    def foretell(
        self, request: int, layer: int, experts: Sequence[int], applied: int
    ) -> tuple[tuple[int, ...], TableChanges] | None:
        """(slots, changes) of the answer that `open_window` would give now, where all are hits.

        None where it would give none at once. Changes nothing: the owner may send the answer and
        call `open_window` after that.
        """
        versions = self._book.versions
        may_open = self._parts.engine is Engine.ATTACHED and self._windows.expects(request)
        if not may_open or applied > versions.current:
            return None
        first, slot_of = layer * self._book.n_experts, self._book.slot_of
        try:
            slots = tuple([slot_of[first + expert] for expert in experts])
        except KeyError:
            return None
        return slots, versions.since(applied)

    def open_stream(
        self,
        request: int,
        step: int,
        layer: int,
        experts: Sequence[int],
        window: int,
        busy: Sequence[int],
        applied: int,
        epoch_done: int,
        epoch_launched: int = 0,
        ahead: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Serve a Stream: as `open_window`, but in parts, as `consume` makes room for the rest.

        window  most experts that are read and not consumed
        ahead   (layer, expert) keys to read then, for the next layer
        """
        keys = self._keys(layer, experts)
        stream = StreamWindow(
            request, layer, tuple(experts), keys, frozenset(busy), applied, step=step, limit=window
        )
        stream.ahead = [next_layer * self._book.n_experts + e for next_layer, e in ahead]
        self._open(stream, step, epoch_done, epoch_launched)

    def consume(self, request: int, up_to: int) -> None:
        """Nothing reads the slots of a stream's experts up to this one any more."""
        window = self._windows.open
        if isinstance(window, StreamWindow) and window.request == request:
            window.consume(up_to)
            self._serving.settle()

    def _keys(self, layer: int, experts: Sequence[int]) -> tuple[int, ...]:
        return tuple(layer * self._book.n_experts + expert for expert in experts)

    def _open(self, window: Window, step: int, epoch_done: int, epoch_launched: int) -> None:
        request = window.request
        known = self._windows.known(request)
        if known is not None:
            check_same(known, window.layer, window.experts)
        elif self._parts.engine is not Engine.ATTACHED:
            raise RequestRefused("hello_first", f"request {request}: no engine is attached")
        else:
            self._windows.check_new(request)
        self._acknowledge(window.applied, epoch_done, epoch_launched)
        if known is None:
            is_stream = isinstance(window, StreamWindow)
            self.counters.n_streams += is_stream
            self._windows.start(window)
            self._serving.count(step, np.array(window.keys, np.int64), as_stream=is_stream)
            self._serving.find(window)
            self._serving.advance(step, window.layer)
            self._serving.settle()
        elif known is not self._windows.open:
            self._serving.answer(known, window.applied)

    def cancel(self, request: int) -> None:
        """Close the window now; its answer lists every change made and CANCELLED keys.

        Reads under way go on; their slots stay LOADING until `finish` or `fail`, and what
        finishes well is published. A number already answered is answered again; an unknown
        one with no slots.
        """
        window = self._windows.known(request)
        if window is None:
            applied = self._parts.retired.applied
            window = Window(request, 0, (), (), frozenset(), max(applied, 0))
        elif window is self._windows.open:
            self._serving.close_early(f"request {request} was cancelled before its read ended")
            self.counters.n_cancelled += 1
        self._serving.answer(window, window.applied)
        self._serving.settle()

    def ack(self, applied: int, epoch_done: int, epoch_launched: int = 0) -> None:
        """The device's table reflects version `applied`; launches up to `epoch_done` are done.

        epoch_launched  the engine's launch counter as read after the message came. A RETIRING
                        slot is FREE once its version is applied and every launch up to the
                        counter seen then is done. 0 where the engine launches synchronously.
        Raises RequestRefused for a version that does not exist yet.
        """
        self._acknowledge(applied, epoch_done, epoch_launched)
        self._serving.settle()

    def touch(self, step: int, picks: NDArray[np.uint16]) -> int:
        """Count uses, [n, 2] of (layer, expert); each (step, layer, expert) once; return how many.

        Raises RequestRefused for a pick that the model does not have.
        """
        n_layers, n_experts = self._book.table.shape
        if len(picks) and (picks[:, 0].max() >= n_layers or picks[:, 1].max() >= n_experts):
            text = f"touch: a pick outside {n_layers} layers of {n_experts} experts"
            raise RequestRefused("malformed", text)
        keys = picks[:, 0].astype(np.int64) * n_experts + picks[:, 1]
        self._serving.advance(step, n_layers)
        return self._serving.count(step, np.unique(keys))

    # advice

    def hint(self, step: int, keys: Sequence[tuple[int, int]]) -> None:
        """(layer, expert) keys that this step may want, best first, where hints are followed."""
        self._serving.foresight.hint(step, keys)
        self._serving.settle()

    def warm(self, keys: Sequence[tuple[int, int]]) -> None:
        """(layer, expert) keys to load when idle, in this order, in place of the last call's."""
        self._serving.foresight.warm(layer * self._book.n_experts + e for layer, e in keys)
        self._serving.settle()

    def _acknowledge(self, applied: int, epoch_done: int, epoch_launched: int) -> None:
        current = self._book.versions.current
        if applied > current:
            text = f"version {applied} was applied, the table is at {current}"
            raise RequestRefused("malformed", text)
        self._parts.retired.ack(applied, epoch_done, epoch_launched)
