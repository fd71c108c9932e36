"""Headers of the routing kernels as the host reads them."""

from __future__ import annotations

import pytest
import torch

from compute.graph.headers import Headers
from protocol.errors import ShardError


def headers(rows: list[list[int]], n_experts: int = 8) -> Headers:
    found = Headers(torch.tensor(rows, dtype=torch.int32), n_experts)
    found.read(0, len(rows))
    return found


def test_absent_picks_are_those_without_a_slot() -> None:
    found = headers([[0, 1, 5, 0, 0, 3, 4], [1, 2, 7, 0, 0, -1, 9]])
    assert found.n_absent(0, 2) == [0, 1]
    assert found.absent(0) == []
    assert found.absent(1) == [2]
    assert found.all_picks().tolist() == [[1, 5], [2, 7]]


@pytest.mark.parametrize("picks", [[5, 5], [6, 2], [-1, 3], [2, 8]])
def test_picks_that_are_none_are_named(picks: list[int]) -> None:
    found = headers([[0, 0, 1, 0, 0, 0, 0], [0, *picks, 0, 0, 0, 0]])
    with pytest.raises(ShardError, match="layer 1"):
        found.picks(1)
    with pytest.raises(ShardError, match="layer 1"):
        found.all_picks()
