"""Parameters beside one another: each value in `make test`, all combinations in `make accept`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def in_turn(**values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize by all combinations; those that bring no value that was not there are `accept`.

    The first combination has every first value, the next one every second, the shorter lists from
    their beginning again.
    """
    lists = list(values.values())
    n_turns = max(map(len, lists))
    places = {tuple(turn % len(one) for one in lists) for turn in range(n_turns)}
    every = product(*(range(len(one)) for one in lists))
    return pytest.mark.parametrize(
        list(values),
        [
            pytest.param(
                *(one[place] for one, place in zip(lists, chosen, strict=True)),
                marks=() if chosen in places else pytest.mark.accept,
            )
            for chosen in every
        ],
    )
