"""Messages of the token's path, told to be right at a glance.

`GLANCES` has a predicate a message: True only where every check of schema.py would pass and leave
each value as it is. False means nothing: the checks decide, and say what is wrong. Values stand in
the order of the fields. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import messages as m
from .fields import U31, U63, Bounds
from .limits import MAX_LIST
from .records import ROW_NUMBER

Glance = Callable[[Sequence[Any], Bounds], bool]

_FEW = 64  # entries of a list that are looked at here; longer ones take their time elsewhere
_ROW_BYTES = ROW_NUMBER.itemsize
_TOO_MANY = 1 << 62


def _ascending(items: Any, end: int) -> bool:
    """At most _FEW integers, each above the one before it, from 0 to end - 1."""
    if type(items) is not tuple:
        return False
    before = -1
    for item in items:
        if type(item) is not int or item <= before:
            return False
        before = item
    return before < end and len(items) <= _FEW


def _slots(items: Any, bounds: Bounds) -> bool:
    """At most _FEW slots, each once."""
    if type(items) is not tuple:
        return False
    end = bounds.n_slots
    for item in items:
        if type(item) is not int or not 0 <= item < end:
            return False
    n_items = len(items)
    return n_items <= _FEW and n_items <= bounds.n_experts and len(set(items)) == n_items


def _changes(items: Any, bounds: Bounds) -> bool:
    """At most _FEW changes, each key above the one before it, each slot once."""
    if type(items) is not tuple or len(items) > _FEW:
        return False
    before, held = (-1, -1), set()
    for item in items:
        if type(item) is not tuple or len(item) != 3:
            return False
        layer, expert, slot = item
        if not (type(layer) is type(expert) is type(slot) is int) or layer < 0 or expert < 0:
            return False
        key = (layer, expert)
        if key <= before or layer >= bounds.n_layers or expert >= bounds.n_experts:
            return False
        before = key
        if slot != -1:
            if not 0 <= slot < bounds.n_slots or slot in held:
                return False
            held.add(slot)
    return len(items) <= bounds.n_layers * bounds.n_experts


def _miss_request(values: Sequence[Any], bounds: Bounds) -> bool:
    request, step, layer, experts, busy, applied, epoch_done, hints = values
    return (
        type(request) is type(step) is type(layer) is type(applied) is type(epoch_done) is int
        and 0 < request <= U63
        and 0 <= step <= U63
        and 0 <= layer < bounds.n_layers
        and 0 <= applied <= U63
        and 0 <= epoch_done <= U63
        and _ascending(experts, bounds.n_experts)
        and len(experts) > 0
        and _ascending(busy, bounds.n_slots)
        and type(hints) is tuple
        and not hints
    )


def _slot_changes(values: Sequence[Any], bounds: Bounds) -> bool:
    request, from_version, to_version, slots, changes, errors, n_bytes, read_ms, final = values
    return (
        type(request) is type(from_version) is type(to_version) is type(n_bytes) is int
        and 0 < request <= U63
        and 0 <= from_version <= to_version <= U63
        and 0 <= n_bytes <= U63
        and type(read_ms) is float
        and 0.0 <= read_ms <= U31
        and type(final) is bool
        and _changes(changes, bounds)
        and type(errors) is tuple
        and not errors
        and _slots(slots, bounds)
    )


def _row_request(values: Sequence[Any], bounds: Bounds) -> bool:
    request, table, rows, others = values
    if type(others) is not tuple or len(others) > 1:
        return False
    n_bytes = 0
    for other in others:
        if type(other) is not tuple or len(other) != 2 or not _are_rows(*other, bounds):
            return False
        n_bytes = len(other[1]) if other[0] != table else _TOO_MANY
    return (
        type(request) is int
        and 0 < request <= U63
        and _are_rows(table, rows, bounds)
        and n_bytes + len(rows) <= _ROW_BYTES * bounds.ring_rows
    )


def _are_rows(table: Any, rows: Any, bounds: Bounds) -> bool:
    return (
        type(table) is int
        and 0 <= table < bounds.n_tables
        and type(rows) is bytes
        and _ROW_BYTES <= len(rows) <= _ROW_BYTES * bounds.ring_rows
        and len(rows) % _ROW_BYTES == 0
    )


def _rows_ready(values: Sequence[Any], bounds: Bounds) -> bool:
    request, position, n_rows, errors = values
    return (
        type(request) is type(position) is type(n_rows) is int
        and 0 < request <= U63
        and position >= 0
        and n_rows >= 0
        and position + n_rows <= bounds.ring_rows
        and type(errors) is tuple
        and not errors
    )


def _numbered(values: Sequence[Any], _bounds: Bounds) -> bool:
    (request,) = values
    return type(request) is int and 0 < request <= U63


def _ack(values: Sequence[Any], _bounds: Bounds) -> bool:
    applied, epoch_done, n_slots = values
    return (
        type(applied) is type(epoch_done) is type(n_slots) is int
        and 0 <= applied <= U63
        and 0 <= epoch_done <= U63
        and 0 <= n_slots <= U31
    )


GLANCES: dict[type, Glance] = {
    m.MissRequest: _miss_request,
    m.SlotChanges: _slot_changes,
    m.RowRequest: _row_request,
    m.RowsReady: _rows_ready,
    m.RowsDone: _numbered,
    m.Ping: _numbered,
    m.Pong: _numbered,
    m.Ack: _ack,
}

assert _FEW <= MAX_LIST
