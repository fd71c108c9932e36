"""Checks of fields that are binary tables, as in fields.py, and the tables' numpy types."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .fields import Bounds, Unfit, bytes_, shown, table_index, tuple_

PICK = np.dtype([("layer", "<u2"), ("expert", "<u2")])
KEY_RECORD = np.dtype([("layer", "<u2"), ("expert", "<u2"), ("slot", "<i4")])
ROW_NUMBER = np.dtype("<u4")
TABLE_ENTRY = np.dtype("<i4")
SCORE = np.dtype("<f4")


def _records(value: Any, dtype: np.dtype[Any], at_least: int = 0) -> NDArray[Any]:
    raw = bytes_(value)
    if len(raw) % dtype.itemsize:
        raise Unfit("size", f"found {len(raw)} bytes, wanted a multiple of {dtype.itemsize}")
    if len(raw) < at_least * dtype.itemsize:
        raise Unfit("size", f"found {len(raw)} bytes, wanted {at_least * dtype.itemsize} or more")
    records: NDArray[Any] = np.frombuffer(raw, dtype)
    return records


def _flat_keys(records: NDArray[Any], bounds: Bounds) -> NDArray[Any]:
    for name, end in (("layer", bounds.n_layers), ("expert", bounds.n_experts)):
        wrong = records[name] >= end
        if wrong.any():
            found = int(records[name][wrong][0])
            raise Unfit("range", f"found {name} {found}, wanted 0 to {end - 1}")
    flat: NDArray[Any] = records["layer"].astype(np.int64) << 16 | records["expert"]
    return flat


def picks(value: Any, bounds: Bounds) -> bytes:
    """u16 pairs (layer, expert), ascending, no key twice."""
    flat = _flat_keys(_records(value, PICK), bounds)
    if (np.diff(flat) <= 0).any():
        raise Unfit("order", "wanted keys ascending, each once")
    return bytes_(value)


def ranked_picks(value: Any, bounds: Bounds) -> bytes:
    """u16 pairs (layer, expert), best first, no key twice."""
    flat = _flat_keys(_records(value, PICK), bounds)
    if len(np.unique(flat)) != len(flat):
        raise Unfit("order", "found a key twice, wanted each once")
    return bytes_(value)


def key_records(value: Any, bounds: Bounds) -> bytes:
    """Records (layer, expert, slot), ascending by key, no key and no slot twice."""
    records = _records(value, KEY_RECORD)
    flat = _flat_keys(records, bounds)
    _slots_in_range(records["slot"], bounds, lowest=0)
    if (np.diff(flat) <= 0).any() or len(np.unique(records["slot"])) != len(records):
        raise Unfit("order", "wanted keys ascending, each key and slot once")
    return bytes_(value)


def _slots_in_range(found: NDArray[Any], bounds: Bounds, lowest: int) -> None:
    wrong = (found < lowest) | (found >= bounds.n_slots)
    if wrong.any():
        slot = int(found[wrong][0])
        raise Unfit("range", f"found slot {slot}, wanted {lowest} to {bounds.n_slots - 1}")


def row_numbers(value: Any, bounds: Bounds) -> bytes:
    """u32 row numbers, at least one."""
    n_rows = len(_records(value, ROW_NUMBER, at_least=1))
    if n_rows > bounds.ring_rows:
        raise Unfit("size", f"found {n_rows} rows, wanted at most {bounds.ring_rows}")
    return bytes_(value)


def other_rows(value: Any, bounds: Bounds) -> tuple[tuple[int, bytes], ...]:
    """(table, row numbers) tuples; may be empty."""
    if type(value) not in (list, tuple) or len(value) > bounds.n_tables:
        raise Unfit("size", f"found {shown(value)}, wanted at most {bounds.n_tables} entries")
    pairs = tuple(tuple_(item, 2) for item in value)
    return tuple((table_index(pair[0], bounds), row_numbers(pair[1], bounds)) for pair in pairs)


def table(value: Any, bounds: Bounds) -> bytes:
    """i32 entries, each a slot or -1, no slot twice; its length is Welcome's to check."""
    entries = _records(value, TABLE_ENTRY, at_least=1)
    _slots_in_range(entries, bounds, lowest=-1)
    held = entries[entries >= 0]
    if len(np.unique(held)) != len(held):
        raise Unfit("order", "found a slot twice, wanted each once")
    return bytes_(value)


def scores(value: Any, _bounds: Bounds) -> bytes:
    """f32 entries without NaN; their number is Welcome's to check."""
    if np.isnan(_records(value, SCORE)).any():
        raise Unfit("range", "found NaN, wanted numbers")
    return bytes_(value)
