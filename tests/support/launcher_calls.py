"""Calls of launchers, from the stops of the tour of kernels, and tensors in other strides."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kernels.attend_sparse_shapes import scratch_values
from kernels.q8_1_rows import empty_rows
from kernels.routed_m1_buffers import RoutedBuffers
from tests.support.kernel_stops import STOPS

Call = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """A call of a launcher."""

    arguments: Call  # by their names
    alive: dict[str, Any]  # what its stop holds: some arguments are addresses of it


_USED = ("likeliest", "select_blocks")  # by the stops; other results are thrown away

# What a launcher fills where it is given, in the order of its result.
_RESULTS = {
    "index_scores": ("scores",),
    "norm_latents": ("qr",),
    "pool_latents": ("latent",),
    "route_m1": ("header", "pointers", "weights"),
    "route_rows": ("picks", "weights"),
    "routed_rows": ("parts",),
    "select_blocks": ("kept",),
    "select_rows": ("selection",),
}


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of an argument or a result, those within it in their order."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in tensors_of(part)]
    return [value] if isinstance(value, Tensor) else []


def with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return the same with other tensors, which come in the order of `tensors_of`."""
    if isinstance(value, Tensor):
        return next(tensors)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        changed = {name: with_tensors(getattr(value, name), tensors) for name in names}
        return dataclasses.replace(value, **changed)
    if isinstance(value, tuple):
        parts = [with_tensors(part, tensors) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def tensor_names(launcher: Callable[..., Any]) -> set[str]:
    """Return the parameters that are tensors or hold some, as annotations say."""
    kinds = ("Tensor", "Planes", "Rows", "RoutedBuffers")
    found = inspect.signature(launcher).parameters.values()
    return {one.name for one in found if any(kind in str(one.annotation) for kind in kinds)}


def calls_of(name: str) -> list[Recorded]:
    """Return calls of a launcher that give it different tensors, results and scratch with them.

    They are what the first stop of the tour that calls it by its name does, and of those that give
    the same ones the last.
    """
    stop = next((one for one in STOPS.values() if name in one.__code__.co_names), None)
    if stop is None:
        raise LookupError(f"tests/support/kernel_stops.py or expert_stops.py never calls {name}")
    launcher = stop.__globals__[name]
    found: dict[tuple[str, ...], Recorded] = {}

    def recorded(*arguments: Any, **options: Any) -> Any:
        call = dict(inspect.signature(launcher).bind(*arguments, **options).arguments)
        kept = {key: copied(value) for key, value in call.items()}
        given = tuple(key for key, value in call.items() if tensors_of(value))
        found[given] = Recorded(kept, dict(sys._getframe(1).f_locals))
        return launcher(*arguments, **options) if name in _USED else None

    stop.__globals__[name] = recorded
    try:
        stop()
    finally:
        stop.__globals__[name] = launcher
    for one in found.values():
        result = launcher(**{key: copied(value) for key, value in one.arguments.items()})
        _fill(launcher, one.arguments, result)
    return list(found.values())


def _fill(launcher: Callable[..., Any], call: Call, result: Any) -> None:
    """Add to a call the tensors that its result goes to, and its scratch."""
    name = launcher.__name__
    names = _RESULTS.get(name, ("out",))
    for key, value in zip(names, result if len(names) > 1 else (result,), strict=True):
        if key in inspect.signature(launcher).parameters and key not in call:
            call[key] = copied(value)
    if name == "routed_m1":
        call["buffers"] = RoutedBuffers.new(call["shape"], len(call["weights"]), "cpu")
    elif name == "gemv_blocks":
        x, groups = call["x"], call.get("groups", 1)
        call["rows"] = empty_rows(len(x) * groups, x.shape[1] // groups, x.device)
    elif name == "attend_sparse":
        (n_tokens, width), n_heads = call["q"].shape, len(call["sink"])
        n_selected = call["selection"].shape[1]
        n = scratch_values(n_tokens, n_heads, width // n_heads, call["window"], n_selected)
        call |= {"splits": 2, "scratch": torch.zeros(n)}


def copied(value: Any) -> Any:
    """Return an argument with tensors of its own, which lie as the given ones do."""

    def copy(tensor: Tensor) -> Tensor:
        new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        return new.copy_(tensor)

    return with_tensors(value, map(copy, tensors_of(value)))


def lain_apart(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor's values in other strides: each second one, rows apart, its axes turned.

    What lies between them is no number, or 0 where a kernel takes whole numbers for places.
    """
    fill = float("nan") if tensor.is_floating_point() else 77 * (tensor.element_size() == 1)

    def empty(*shape: int) -> Tensor:
        return torch.full(shape, fill, dtype=tensor.dtype)

    shape = tuple(tensor.shape)
    yield empty(*shape, 2)[..., 0].copy_(tensor)
    if tensor.dim() > 1:
        yield empty(*shape[:-1], shape[-1] + 3)[..., : shape[-1]].copy_(tensor)
        yield empty(*shape[::-1]).permute(*range(tensor.dim())[::-1]).copy_(tensor)
