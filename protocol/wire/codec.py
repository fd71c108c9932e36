"""Messages to frames and back. The only file that knows msgpack.

A frame is a msgpack array `[kind, session, generation, *fields]`. Both directions check every
field; whatever is wrong raises CodecError and nothing else. Pure: no sockets, no state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from operator import attrgetter
from typing import Any, NamedTuple

import msgpack

from protocol.errors import ProtocolError

from .fields import ANY, U63, Bounds, Check, Unfit, shown
from .limits import MAX_EXTRA_FIELDS, MAX_FRAME_BYTES, MAX_LIST, MAX_VALUES
from .messages import Message
from .quick import GLANCES, Glance
from .schema import FIELDS, KINDS, WHOLE

__all__ = ["Bounds", "CodecError", "Envelope", "decode", "encode"]


class CodecError(ProtocolError):
    """A frame or a message is not what the protocol allows.

    reason   the reason for the Refused that answers it
    fault    what to count: size, syntax, kind, type, range, order, fields
    request  the number of the request it was, 0 where that cannot be told
    """

    def __init__(self, fault: str, text: str, request: int = 0) -> None:
        super().__init__(text)
        self.reason = "malformed"
        self.fault = fault
        self.request = request


class Envelope(NamedTuple):
    """A message and whose it is."""

    message: Message
    session: int  # 0 before Welcome
    generation: int  # of the daemon; 0 before Welcome


@dataclass(frozen=True, slots=True)
class _Plan:
    """How one kind is read: its class, and for each field name, check and default."""

    kind: int
    cls: type[Any]
    names: tuple[str, ...]
    checks: tuple[Check, ...]
    defaults: tuple[Any, ...]  # of the trailing fields that have one
    glance: Glance | None  # tells most messages of this kind to be right, quickly
    values: Callable[[Any], tuple[Any, ...]]  # a message's fields


def _plan(cls: type[Any], kind: int) -> _Plan:
    names = tuple(field.name for field in fields(cls))
    defaults: list[Any] = []
    for field in fields(cls):
        if field.default is not MISSING:
            defaults.append(field.default)
        elif field.default_factory is not MISSING:
            defaults.append(field.default_factory())
    assert len(names) == len(FIELDS[cls]), cls
    return _Plan(
        kind, cls, names, FIELDS[cls], tuple(defaults), GLANCES.get(cls), _values_of(names)
    )


def _values_of(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda message: tuple(getattr(message, name) for name in names)


_PLANS = {kind: _plan(cls, kind) for cls, kind in KINDS.items()}
_PLAN_OF = {plan.cls: plan for plan in _PLANS.values()}


def encode(message: Message, session: int = 0, generation: int = 0) -> bytes:
    """The frame of a message; raises CodecError where a field is not as it must be."""
    plan = _PLAN_OF.get(type(message))
    if plan is None:
        raise CodecError("kind", f"{type(message).__name__} is no message")
    values = plan.values(message)
    array = (plan.kind, _envelope(session, "session"), _envelope(generation, "generation"))
    if plan.glance is not None and plan.glance(values, ANY):
        return _packed(plan, array + values)
    array += tuple(_checked(plan, values, ANY))
    _check_whole(message, ANY)
    return _packed(plan, array)


def _packed(plan: _Plan, array: tuple[Any, ...]) -> bytes:
    try:
        frame: bytes = msgpack.packb(array)
    except (ValueError, TypeError, OverflowError) as error:
        raise CodecError("type", f"{plan.cls.__name__}: {error}") from None
    if len(frame) > MAX_FRAME_BYTES:
        raise CodecError(
            "size",
            f"{plan.cls.__name__}: frame of {len(frame)} bytes, wanted at most {MAX_FRAME_BYTES}",
        )
    return frame


def decode(frame: bytes | memoryview, bounds: Bounds | None = None) -> Envelope:
    """The message in a frame, every field checked; raises CodecError and nothing else.

    Fields that a newer minor version added at the end are passed over; missing ones that have a
    default get it.
    """
    array = _unpacked(frame)
    if type(array) is not tuple or len(array) < 3:
        raise CodecError("syntax", f"found {shown(array)}, wanted [kind, session, generation, ...]")
    kind, session, generation = array[:3]
    values = array[3:]
    plan = _PLANS.get(kind) if type(kind) is int else None
    if plan is None:
        raise CodecError("kind", f"kind {shown(kind)} is not known")
    if plan.glance is not None and len(values) == len(plan.names):
        is_ours = type(session) is type(generation) is int and 0 <= session <= U63
        if is_ours and 0 <= generation <= U63 and plan.glance(values, bounds or ANY):
            return Envelope(plan.cls(*values), session, generation)
    try:
        message = plan.cls(*_checked(plan, _filled(plan, values), bounds or ANY))
        _check_whole(message, bounds or ANY)
        return Envelope(message, _envelope(session, "session"), _envelope(generation, "generation"))
    except CodecError as error:
        error.request = _request_number(plan, values)
        raise


def _unpacked(frame: bytes | memoryview) -> Any:
    n_bytes = len(frame)
    if n_bytes > MAX_FRAME_BYTES:
        raise CodecError("size", f"frame of {n_bytes} bytes, wanted at most {MAX_FRAME_BYTES}")
    try:
        # No list is longer than its frame; what claims to be would only cost time to give up.
        return msgpack.unpackb(
            frame,
            use_list=False,
            max_array_len=min(MAX_LIST, n_bytes),
            max_map_len=min(MAX_VALUES, n_bytes),
        )
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise CodecError("syntax", f"not msgpack: {type(error).__name__} {error}"[:200]) from None


def _filled(plan: _Plan, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """As many values as the message has fields."""
    wanted = len(plan.names)
    extra = values[wanted:]
    if len(extra) > MAX_EXTRA_FIELDS or not all(_is_plain(value) for value in extra):
        raise CodecError("fields", f"{plan.cls.__name__}: unreadable fields after the {wanted}th")
    missing = wanted - len(values)
    if missing > len(plan.defaults):
        raise CodecError(
            "fields", f"{plan.cls.__name__}: found {len(values)} fields, wanted {wanted}"
        )
    if missing > 0:
        return values + plan.defaults[-missing:]
    return values[:wanted]


def _is_plain(value: Any) -> bool:
    """True where no extension type hides in it. Depth is what msgpack allows."""
    pending = [value]
    while pending:
        item = pending.pop()
        if type(item) is tuple:
            pending += item
        elif type(item) is dict:
            pending += item.values()
        elif item is not None and type(item) not in (int, float, str, bytes, bool):
            return False
    return True


def _checked(plan: _Plan, values: Sequence[Any], bounds: Bounds) -> list[Any]:
    place = 0
    checked = []
    try:
        for place, check in enumerate(plan.checks):
            checked.append(check(values[place], bounds))
    except Unfit as error:
        text = f"{plan.cls.__name__}.{plan.names[place]}: {error}"
        raise CodecError(error.kind, text) from None
    return checked


def _check_whole(message: Message, bounds: Bounds) -> None:
    check = WHOLE.get(type(message))
    if check is not None:
        try:
            check(message, bounds)
        except Unfit as error:
            raise CodecError(error.kind, f"{type(message).__name__}: {error}") from None


def _envelope(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value <= U63:
        raise CodecError("type", f"{name}: found {shown(value)}, wanted an integer from 0")
    return value


def _request_number(plan: _Plan, values: tuple[Any, ...]) -> int:
    numbered = bool(plan.names) and plan.names[0] in ("request", "id") and bool(values)
    if numbered and type(values[0]) is int and 0 < values[0] <= U63:
        return values[0]
    return 0
