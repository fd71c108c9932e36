"""What PTX operations on registers give, for all lanes of a warp at once.

Registers are numpy uint64 of any number of lanes; narrower ones hold zeros above.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Lanes = NDArray[np.uint64]
Operation = Callable[[list[str], list[Lanes]], Lanes]


def result(operation: str, v: list[Lanes]) -> Lanes:
    """Return what an operation without memory or other lanes writes; ValueError if unknown."""
    parts = operation.split(".")
    table = _FLOATS if parts[-1] == "f32" and parts[0] in _FLOATS else _WHOLES
    if parts[0] not in table:
        raise ValueError(f"PTX operation {operation}")
    with np.errstate(all="ignore"):
        return table[parts[0]](parts, v)


def floats(v: Lanes) -> NDArray[np.float32]:
    """Registers as f32."""
    return v.astype(np.uint32).view(np.float32)


def bits(values: NDArray[np.floating]) -> Lanes:
    """Values as f32 in registers."""
    return values.astype(np.float32).view(np.uint32).astype(np.uint64)


def cut(v: Lanes | NDArray[np.int64], width: int) -> Lanes:
    """The low bits."""
    v = v.astype(np.uint64)
    return v if width >= 64 else v & np.uint64((1 << width) - 1)


def signed(v: Lanes, width: int) -> NDArray[np.int64]:
    """The low bits as a signed number."""
    whole = cut(v, width).astype(np.int64)
    return whole if width >= 64 else whole - ((whole >> (width - 1)) << width)


def number(v: Lanes, kind: str) -> NDArray[np.int64]:
    """A register as the whole number that its type names."""
    width = int(kind[1:])
    return signed(v, width) if kind[0] == "s" else cut(v, width).astype(np.int64)


def _typed(formula: Callable[..., NDArray[np.int64]]) -> Operation:
    def apply(parts: list[str], v: list[Lanes]) -> Lanes:
        kind = parts[-1]
        if parts[1] == "wide":
            factors = [number(x, kind) for x in v[:2]]
            return (formula(*factors, *(x.astype(np.int64) for x in v[2:]))).astype(np.uint64)
        return cut(formula(*(number(x, kind) for x in v)), int(kind[1:]))

    return apply


def _float(formula: Callable[..., NDArray[np.floating]]) -> Operation:
    return lambda _, v: bits(formula(*(floats(x) for x in v)))


def _quotient(a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))


def _convert(parts: list[str], v: list[Lanes]) -> Lanes:
    to, source = parts[-2], parts[-1]
    if source == "f16":
        return bits(v[0].astype(np.uint16).view(np.float16))
    if source == "f32":
        return cut(np.rint(floats(v[0])).astype(np.int64), int(to[1:]))
    whole = number(v[0], source)
    return bits(whole.astype(np.float32)) if to == "f32" else cut(whole, int(to[1:]))


def _dot(parts: list[str], v: list[Lanes]) -> Lanes:
    width, n = (8, 4) if parts[0] == "dp4a" else (16, 2)
    b = v[1] >> np.uint64(16 if "hi" in parts else 0)
    total = signed(v[2], 32)
    for i in range(n):
        x, y = v[0] >> np.uint64(width * i), b >> np.uint64(8 * i)
        total = total + number(x, f"{parts[-2][0]}{width}") * number(y, f"{parts[-1][0]}8")
    return cut(total, 32)


def _permute(_: list[str], v: list[Lanes]) -> Lanes:
    source, out = cut(v[0], 32) | cut(v[1], 32) << np.uint64(32), np.zeros_like(v[0])
    for i in range(4):
        choice = cut(v[2] >> np.uint64(4 * i), 4)
        byte = cut(source >> (cut(choice, 3) * np.uint64(8)), 8)
        sign = np.where(byte > 127, np.uint64(255), np.uint64(0))
        out |= np.where(choice > 7, sign, byte) << np.uint64(8 * i)
    return out


def _field(parts: list[str], v: list[Lanes]) -> Lanes:
    return cut(number(cut(v[0], 32) >> v[1], f"{parts[-1][0]}{int(v[2][0])}"), 32)


def _funnel(parts: list[str], v: list[Lanes]) -> Lanes:
    both, count = cut(v[0], 32) | cut(v[1], 32) << np.uint64(32), cut(v[2], 5)
    return cut(both >> count if parts[1] == "r" else (both << count) >> np.uint64(32), 32)


def _shift_right(parts: list[str], v: list[Lanes]) -> Lanes:
    kind = parts[-1]
    if kind[0] == "s":
        return cut(signed(v[0], int(kind[1:])) >> v[1].astype(np.int64), int(kind[1:]))
    return cut(v[0], int(kind[1:])) >> v[1]


def _compare(parts: list[str], v: list[Lanes]) -> Lanes:
    is_float = parts[-1] == "f32"
    a, b = (floats(x) if is_float else number(x, parts[-1]) for x in v)
    name = re.sub(r"^(lt|gt|le|ge|eq|ne)u$", r"\1", parts[1])
    either = np.isnan(a) | np.isnan(b) if is_float and name != parts[1] else a != a
    found = {"eq": a == b, "ne": a != b, "lt": a < b, "gt": a > b, "le": a <= b, "ge": a >= b}
    return (found[name] | either).astype(np.uint64)


_FLOATS: dict[str, Operation] = {
    "add": _float(np.add),
    "sub": _float(np.subtract),
    "mul": _float(np.multiply),
    "div": _float(np.divide),
    "neg": _float(np.negative),
    "abs": _float(np.abs),
    "max": _float(np.fmax),
    "min": _float(np.fmin),
    "ex2": _float(np.exp2),
    "rcp": _float(np.reciprocal),
    "fma": _float(lambda a, b, c: a.astype(np.float64) * b + c),
}
_WHOLES: dict[str, Operation] = {
    "mov": lambda _, v: v[0],
    "cvta": lambda _, v: v[0],
    "setp": _compare,
    "selp": lambda _, v: np.where(v[2].astype(bool), v[0], v[1]),
    "cvt": _convert,
    "dp4a": _dot,
    "dp2a": _dot,
    "prmt": _permute,
    "bfe": _field,
    "shf": _funnel,
    "add": _typed(np.add),
    "sub": _typed(np.subtract),
    "mul": _typed(np.multiply),
    "mad": _typed(lambda a, b, c: a * b + c),
    "div": _typed(_quotient),
    "rem": _typed(lambda a, b: a - _quotient(a, b) * b),
    "min": _typed(np.minimum),
    "max": _typed(np.maximum),
    "neg": _typed(np.negative),
    "and": lambda _, v: v[0] & v[1],
    "or": lambda _, v: v[0] | v[1],
    "xor": lambda _, v: v[0] ^ v[1],
    "not": lambda parts, v: cut(~v[0], int(parts[-1][1:]) if parts[-1] != "pred" else 1),
    "shl": lambda parts, v: cut(v[0] << v[1], int(parts[-1][1:])),
    "shr": _shift_right,
}
