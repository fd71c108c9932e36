"""What every test of kernels finds: memory that holds nothing to rely on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor


def _poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def allocated(*arguments: Any, **options: Any) -> Tensor:
        tensor = allocate(*arguments, **options)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 0x55)

    return allocated


@pytest.fixture(autouse=True)
def _fresh_memory_is_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no launcher's output or scratch be right by chance where no kernel has written it."""
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))
