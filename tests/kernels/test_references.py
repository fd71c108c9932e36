"""Each kernel has its reference: in the file of the same name, a function of the same name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest

from tests.support.jit_kernels import launchers
from tests.support.kernel_stops import STOPS

LAUNCHERS = launchers()


def reached(function: Callable[..., Any]) -> Iterator[str]:
    """Name the functions that a stop of the tour calls, by itself or through its like."""
    for name in function.__code__.co_names:
        found = function.__globals__.get(name)
        if inspect.isfunction(found):
            yield f"{found.__module__.rpartition('.')[2]}.{found.__name__}"
            if found.__module__ == function.__module__:
                yield from reached(found)


@pytest.mark.parametrize("launcher", sorted(LAUNCHERS))
def test_a_launcher_runs_the_reference_of_its_name_on_the_cpu(launcher: str) -> None:
    module, _, name = launcher.partition(".")
    reference = import_module(f"kernels.reference.{module}")
    assert inspect.isfunction(getattr(reference, name, None))
    assert f"reference.{name}(" in inspect.getsource(import_module(f"kernels.{module}"))


def test_every_kernel_of_the_tour_is_launched_by_one_of_them() -> None:
    without = [kernel for kernel, stop in STOPS.items() if not LAUNCHERS & set(reached(stop))]
    assert not without
    named = {name for stop in STOPS.values() for name in reached(stop)}
    assert named >= LAUNCHERS
