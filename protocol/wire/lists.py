"""Checks of fields that are lists or dictionaries, as in fields.py."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from .fields import ANY, U31, U32, U63, Bounds, Unfit, below, count, shown, text, tuple_
from .limits import MAX_LIST, MAX_NAME, MAX_VALUES
from .messages import ERROR_CODES


def _items(value: Any, at_most: int, at_least: int = 0) -> list[Any] | tuple[Any, ...]:
    if type(value) is not list and type(value) is not tuple:
        raise Unfit("type", f"found {shown(value)}, wanted a list")
    if not at_least <= len(value) <= at_most:
        raise Unfit("size", f"found {len(value)} entries, wanted {at_least} to {at_most}")
    return value


def _integers(value: Any, end: int, name: str, at_least: int) -> tuple[int, ...]:
    items = tuple(_items(value, min(end, MAX_LIST), at_least))
    for item in items:
        if type(item) is not int:
            raise Unfit("type", f"found {name} {shown(item)}, wanted an integer")
        if not 0 <= item < end:
            raise Unfit("range", f"found {name} {item}, wanted 0 to {end - 1}")
    return items


def _ascending(items: tuple[Any, ...], name: str) -> None:
    for before, after in pairwise(items):
        if before >= after:
            raise Unfit(
                "order", f"found {name} {after} after {before}, wanted ascending, each once"
            )


def _distinct(items: tuple[Any, ...], name: str) -> None:
    if len(set(items)) != len(items):
        raise Unfit("order", f"found a {name} twice, wanted each once")


def experts(value: Any, bounds: Bounds) -> tuple[int, ...]:
    """Experts of one layer, ascending, at least one."""
    items = _integers(value, bounds.n_experts, "expert", 1)
    _ascending(items, "expert")
    return items


def ranked_experts(value: Any, bounds: Bounds) -> tuple[int, ...]:
    """Experts of one layer, best first, no duplicates."""
    items = _integers(value, bounds.n_experts, "expert", 1)
    _distinct(items, "expert")
    return items


def slots(value: Any, bounds: Bounds) -> tuple[int, ...]:
    """Arena slots, ascending."""
    items = _integers(value, bounds.n_slots, "slot", 0)
    _ascending(items, "slot")
    return items


def chunks(value: Any, bounds: Bounds) -> tuple[int, ...]:
    """Chunks of the arena, ascending, at least one."""
    items = _integers(value, bounds.n_slots, "chunk", 1)
    _ascending(items, "chunk")
    return items


def tokens(value: Any, _bounds: Bounds) -> tuple[int, ...]:
    """Token ids."""
    return _integers(value, U31 + 1, "token", 0)


def logprobs(value: Any, _bounds: Bounds) -> tuple[float, ...]:
    """Finite floats."""
    items = _items(value, MAX_LIST)
    for item in items:
        if type(item) not in (int, float) or not math.isfinite(item):
            raise Unfit("type", f"found {shown(item)}, wanted a finite number")
    return tuple(float(item) for item in items)


def answered_slots(value: Any, bounds: Bounds) -> tuple[int, ...]:
    """Slots parallel to a request's experts, -1 where there is none; no slot twice."""
    items = tuple(_items(value, min(bounds.n_experts, MAX_LIST)))
    held = []
    for item in items:
        if type(item) is not int:
            raise Unfit("type", f"found slot {shown(item)}, wanted an integer")
        if item != -1:
            held.append(below(item, bounds.n_slots, "slot"))
    _distinct(tuple(held), "slot")
    return items


def _key(item: tuple[Any, ...], bounds: Bounds) -> None:
    below(item[0], bounds.n_layers, "layer")
    below(item[1], bounds.n_experts, "expert")


def _n_keys(bounds: Bounds) -> int:
    return min(bounds.n_layers * bounds.n_experts, MAX_LIST)


def keys(value: Any, bounds: Bounds) -> tuple[tuple[int, int], ...]:
    """(layer, expert) tuples, no key twice; at least one."""
    return _keys(_items(value, _n_keys(bounds), 1), bounds)


def hints(value: Any, bounds: Bounds) -> tuple[tuple[int, int], ...]:
    """(layer, expert) tuples, no key twice; may be empty."""
    return _keys(_items(value, _n_keys(bounds)), bounds)


def _keys(items: Any, bounds: Bounds) -> tuple[tuple[int, int], ...]:
    pairs = tuple(tuple_(item, 2) for item in items)
    for pair in pairs:
        _key(pair, bounds)
    _distinct(pairs, "key")
    return pairs


def changes(value: Any, bounds: Bounds) -> tuple[tuple[int, int, int], ...]:
    """(layer, expert, slot or -1), ascending by key, no key and no slot twice."""
    items = tuple(tuple_(item, 3) for item in _items(value, _n_keys(bounds)))
    held = []
    for item in items:
        _key(item, bounds)
        if item[2] != -1 or type(item[2]) is not int:
            held.append(below(item[2], bounds.n_slots, "slot"))
    _ascending(tuple(item[:2] for item in items), "key")
    _distinct(tuple(held), "slot")
    return items


def errors(value: Any, bounds: Bounds) -> tuple[tuple[int, int, str, str], ...]:
    """(layer, expert, code, text), ascending by key, no key twice."""
    items = tuple(tuple_(item, 4) for item in _items(value, _n_keys(bounds)))
    for item in items:
        _key(item, bounds)
        _code_and_text(item[2:], bounds)
    _ascending(tuple(item[:2] for item in items), "key")
    return items


def row_errors(value: Any, bounds: Bounds) -> tuple[tuple[int, str, str], ...]:
    """(row, code, text)."""
    items = tuple(tuple_(item, 3) for item in _items(value, min(bounds.ring_rows, MAX_LIST)))
    for item in items:
        below(item[0], U32 + 1, "row")
        _code_and_text(item[1:], bounds)
    return items


def _code_and_text(item: tuple[Any, ...], bounds: Bounds) -> None:
    if item[0] not in ERROR_CODES:
        raise Unfit("range", f"found code {shown(item[0])}, wanted one of {', '.join(ERROR_CODES)}")
    text(item[1], bounds)


def leases(value: Any, bounds: Bounds) -> tuple[tuple[int, int, int, int], ...]:
    """(layer, expert, slot, generation), no key and no slot twice."""
    items = tuple(tuple_(item, 4) for item in _items(value, _n_keys(bounds)))
    for item in items:
        _key(item, bounds)
        below(item[2], bounds.n_slots, "slot")
        count(item[3], bounds)
    _distinct(tuple(item[:2] for item in items), "key")
    _distinct(tuple(item[2] for item in items), "slot")
    return items


def released(value: Any, bounds: Bounds) -> tuple[tuple[int, int], ...]:
    """(slot, generation), at least one, none twice."""
    items = tuple(tuple_(item, 2) for item in _items(value, min(bounds.n_slots, MAX_LIST), 1))
    for item in items:
        below(item[0], bounds.n_slots, "slot")
        count(item[1], bounds)
    _distinct(items, "lease")
    return items


def values(value: Any, _bounds: Bounds) -> dict[str, Any]:
    """A dictionary from names to integers, finite floats and texts."""
    return _values(value, lists=False)


def settings(value: Any, _bounds: Bounds) -> dict[str, Any]:
    """As values, and lists of finite numbers too; their integers are not negative."""
    return _values(value, lists=True)


def _values(value: Any, *, lists: bool) -> dict[str, Any]:
    if type(value) is not dict:
        raise Unfit("type", f"found {shown(value)}, wanted names and values")
    if len(value) > MAX_VALUES:
        raise Unfit("size", f"found {len(value)} entries, wanted at most {MAX_VALUES}")
    result = {}
    for name, entry in value.items():
        if type(name) is not str or len(name) > MAX_NAME:
            raise Unfit("type", f"found name {shown(name)}, wanted at most {MAX_NAME} characters")
        result[name] = _entry(name, entry, lists=lists)
    return result


def _entry(name: str, entry: Any, *, lists: bool) -> Any:
    if type(entry) is int and -U63 <= entry <= U63:
        return entry
    if type(entry) is float and math.isfinite(entry):
        return entry
    if type(entry) is str:
        return text(entry, ANY)
    if lists and type(entry) in (list, tuple):
        return _numbers(name, entry)
    raise Unfit("type", f"found {shown(name)}: {shown(entry)}, wanted a number or a text")


def _numbers(name: str, value: Any) -> tuple[int | float, ...]:
    items = tuple(_items(value, MAX_LIST))
    for item in items:
        if not (type(item) is int and 0 <= item <= U31) and not (
            type(item) is float and math.isfinite(item)
        ):
            raise Unfit("type", f"found {name} {shown(item)}, wanted a number")
    return items
