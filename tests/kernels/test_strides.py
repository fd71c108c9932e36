"""Every launcher reads a tensor by its strides, or refuses it."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import stop_tensors
from tests.support.jit_kernels import launchers
from tests.support.launcher_calls import (
    Call,
    calls_of,
    copied,
    lain_apart,
    tensor_names,
    tensors_of,
    with_tensors,
)  # fmt: skip


def outcome(launcher: Any, call: Call) -> list[Tensor] | str:
    """Run a launcher; return its result and what its arguments hold then, or why it refuses."""
    try:
        result = launcher(**call)
    except ValueError as error:
        return str(error)
    return [tensor.clone() for tensor in (*tensors_of(result), *tensors_of(list(call.values())))]


def same(found: Tensor, wanted: Tensor) -> bool:
    """Whether all bytes are equal."""
    both = (x.contiguous().view(-1).view(torch.uint8) for x in (found, wanted))
    return found.shape == wanted.shape and torch.equal(*both)


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, under the interpreter
@pytest.mark.parametrize("name", sorted(launchers()))
def test_a_tensor_in_other_strides_gives_the_same_bytes_or_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_tensors, "DEVICE", "cpu")
    torch.manual_seed(0)
    module, _, function = name.partition(".")
    launcher = getattr(importlib.import_module(f"kernels.{module}"), function)
    seen = set()
    for recorded in calls_of(function):
        call = recorded.arguments
        wanted = outcome(launcher, {key: copied(value) for key, value in call.items()})
        assert not isinstance(wanted, str), wanted
        for key, value in call.items():
            tensors = tensors_of(value)
            seen.update([key] if tensors else [])
            for at, tensor in enumerate(tensors):
                for other in lain_apart(tensor):
                    if other.is_contiguous():  # of one value, or one row
                        continue
                    changed = {one: copied(given) for one, given in call.items()}
                    parts = tensors_of(changed[key])
                    parts[at] = other
                    changed[key] = with_tensors(value, iter(parts))
                    where = f"{key}[{at}] {tuple(other.shape)} in strides {other.stride()}"
                    found = outcome(launcher, changed)
                    if isinstance(found, str):
                        assert re.search(rf"\b{key}\b.*contiguous", found), (where, found)
                    else:
                        assert all(map(same, found, wanted)), where
    missing = tensor_names(launcher) - seen
    assert not missing, f"no stop gives {name} its {', '.join(sorted(missing))}"
