"""Headers of the routing kernels as the host reads them."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from compute.graph.headers import Headers
from protocol.errors import ShardError


def headers(rows: list[list[int]], n_experts: int = 8) -> Headers:
    return Headers(torch.tensor(rows, dtype=torch.int32), n_experts)


def test_absent_picks_are_those_without_a_slot() -> None:
    found = headers([[0, 1, 5, 0, 0, 3, 4], [1, 2, 7, 0, 0, -1, 9]])
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


def test_the_first_flag_is_found_though_later_layers_have_not_run() -> None:
    rows = torch.zeros((4, 7), dtype=torch.int32)
    found = Headers(rows, 8)
    found.expect(0, 4)
    rows[0] = torch.tensor([0, 1, 5, 0, 0, 3, 4], dtype=torch.int32)
    rows[1] = torch.tensor([1, 2, 7, 0, 0, -1, 9], dtype=torch.int32)
    assert found.first_flagged(0, 4, lambda: False) == 1
    rows[2:] = rows[0]
    assert found.first_flagged(2, 4, lambda: False) == -1


@pytest.mark.parametrize("order", [range(7), range(6, -1, -1), (3, 0, 6, 1, 5, 2, 4)])
def test_a_header_is_used_once_all_of_its_words_have_come(order: range | tuple[int, ...]) -> None:
    rows = torch.zeros((1, 7), dtype=torch.int32)
    found = Headers(rows, 8)
    found.expect(0, 1)
    whole = [1, 2, 7, 0, 0, -1, 9]

    def write() -> None:
        for place in order:
            time.sleep(0.002)
            rows[0, place] = whole[place]

    writer = threading.Thread(target=write)
    writer.start()
    assert found.first_flagged(0, 1, lambda: False) == 0
    assert rows[0].tolist() == whole
    writer.join()


def test_a_header_that_never_comes_is_an_error_and_no_endless_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = headers([[0, 1, 5, 0, 0, 3, 4]])
    found.expect(0, 1)
    with pytest.raises(ShardError, match="layer 0: the device ended without its header"):
        found.first_flagged(0, 1, lambda: True)
    monkeypatch.setattr("compute.graph.headers.WAIT_S", 0.05)
    with pytest.raises(ShardError, match=r"waited 0\.05 s"):
        found.first_flagged(0, 1, lambda: False)
