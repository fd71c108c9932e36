"""Drawn ids: the kernels', the reference's and the host's are one, for any logits and filters."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from compute.host_draw import DrawNumbers
from compute.host_draw import draw as host_draw
from compute.sampler import Sampling, draw_numbers
from kernels.draw import draw
from kernels.likeliest import likeliest
from kernels.reference import draw as reference
from tests.support.plain_draws import (
    ANY_DRAW,
    FILTERS,
    KINDS,
    SIZES,
    Row,
    hard_cases,
    hard_row,
    weights_of,
)

INTERPRETED = pytest.param("cpu", marks=pytest.mark.interpreter)
DEVICE = pytest.param("cuda", marks=pytest.mark.gpu)
VOCABULARY = 129_280


@pytest.fixture(autouse=True)
def _logits_may_lie_far_apart() -> Iterator[None]:
    """Their difference may be infinite, which the interpreter, made of numpy, would warn of."""
    with np.errstate(over="ignore"):
        yield


def page(numbers: DrawNumbers) -> Tensor:
    """The numbers as launches take them."""
    return torch.from_numpy(np.array(numbers, np.uint64).view(np.int64))


def drawn(
    row: Row, numbers: DrawNumbers, device: str, *, filtered: bool | None = None
) -> list[int]:
    """What the launcher finds on a device."""
    logits = torch.from_numpy(row).to(device)
    out = torch.full((2,), -7, device=device)
    filtered = numbers.is_filtered if filtered is None else filtered
    found = draw(logits, likeliest(logits), page(numbers).to(device), filtered=filtered, out=out)
    assert found is out
    return out.tolist()


def referred(row: Row, numbers: DrawNumbers) -> list[int]:
    """What the reference finds."""
    logits = torch.from_numpy(row)
    return reference.draw(logits, likeliest(logits), page(numbers)).tolist()


@pytest.mark.parametrize("n", SIZES)
def test_the_reference_draws_the_hosts_ids(n: int) -> None:
    for row, numbers in hard_cases(n):
        assert referred(row, numbers) == drawn(row, numbers, "cpu") == [host_draw(row, numbers), 0]


@pytest.mark.parametrize("device", [INTERPRETED, DEVICE])
@pytest.mark.parametrize("n", SIZES)
def test_hard_logits_are_drawn_from_as_by_the_reference(device: str, n: int) -> None:
    step = 7 if device == "cpu" else 1  # no divisor of the filters' number: each kind meets others
    assert len(FILTERS) % step or step == 1
    for row, numbers in islice(hard_cases(n), n % step, None, step):
        assert drawn(row, numbers, device) == referred(row, numbers), numbers


@pytest.mark.interpreter
@settings(deadline=None, max_examples=25)
@given(ANY_DRAW)
def test_any_draw_of_the_kernels_is_the_references_and_the_hosts(
    case: tuple[Row, DrawNumbers],
) -> None:
    row, numbers = case
    assert drawn(row, numbers, "cpu") == referred(row, numbers) == [host_draw(row, numbers), 0]


@pytest.mark.parametrize("device", [INTERPRETED, DEVICE])
def test_without_filters_both_ways_draw_one_id(device: str) -> None:
    for kind in KINDS:
        row, numbers = hard_row(kind, 1100), draw_numbers(Sampling(min_p=0.01), 5)
        found = [drawn(row, numbers, device, filtered=filtered) for filtered in (False, True)]
        assert found == [referred(row, numbers)] * 2


@pytest.mark.parametrize("device", [INTERPRETED, DEVICE])
@pytest.mark.parametrize("word", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_words_at_the_edges_find_an_id(device: str, word: int) -> None:
    row = hard_row("normal", 2100)
    for sampling in (Sampling(), Sampling(top_k=3), Sampling(top_p=0.7)):
        numbers = draw_numbers(sampling, 0)._replace(word=word)
        assert drawn(row, numbers, device) == referred(row, numbers)


@pytest.mark.parametrize("device", ["cpu", INTERPRETED, DEVICE])
@pytest.mark.parametrize("filtered", [False, True])
def test_each_id_has_just_the_words_that_its_weight_gives_it(device: str, filtered: bool) -> None:
    row = np.array([0.3, -1, 2, 2, -40, 0], np.float32)
    for sampling in (Sampling(), Sampling(min_p=1)):
        numbers = draw_numbers(sampling, 0)
        weights = [w if w >= numbers.least else 0 for w in weights_of(row, numbers)]
        below, total = 0, sum(weights)
        for token, weight in enumerate(weights):
            first = -(-below * 2**64 // total)  # the lowest word whose point is not below
            below += weight
            last = -(-below * 2**64 // total) - 1
            for word in (first, last) if weight else ():
                own = numbers._replace(word=word)
                assert drawn(row, own, device, filtered=filtered) == [token, 0]


@pytest.mark.parametrize("device", ["cpu", INTERPRETED, DEVICE])
def test_a_share_of_next_to_nothing_keeps_one_id(device: str) -> None:
    for kind in ("equal", "normal"):
        row = np.append(np.full(3, -5, np.float32), hard_row(kind, 70) + 20)
        numbers = DrawNumbers(0x3F800000, 0, 1, 1, 2**64 - 1)
        assert drawn(row, numbers, device) == [host_draw(row, numbers), 0] == [row.argmax(), 0]


@pytest.mark.parametrize("device", ["cpu", INTERPRETED, DEVICE])
def test_an_id_of_just_the_least_weight_is_kept(device: str) -> None:
    row = hard_row("normal", 40)
    numbers = draw_numbers(Sampling(), 0)._replace(word=2**64 - 1)
    weights = weights_of(row, numbers)
    for filtered in (False, True):
        for least in sorted(weights)[::8]:
            kept = [token for token in range(40) if weights[token] >= least]
            own = numbers._replace(least=least)
            assert drawn(row, own, device, filtered=filtered) == [kept[-1], 0]


@pytest.mark.parametrize("device", ["cpu", INTERPRETED, DEVICE])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_nan_is_reported_with_its_id(device: str, sign: float) -> None:
    row = hard_row("normal", 3000)
    row[[2222, 2500]] = np.copysign(np.float32("nan"), np.float32(sign))
    for sampling in (Sampling(), Sampling(top_k=3, top_p=0.5), Sampling(top_p=0.999)):
        assert drawn(row, draw_numbers(sampling, 0), device) == [2222, 1]
    assert drawn(np.full(5, np.float32("nan")), draw_numbers(Sampling(top_p=0.5), 0), device)[1]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_vocabulary_is_drawn_from_as_by_the_host(kind: str) -> None:
    row = hard_row(kind, VOCABULARY)
    for place, sampling in enumerate([*FILTERS, Sampling(top_k=70_000, top_p=0.9)]):
        for position in range(3):
            numbers = draw_numbers(sampling, 10 * place + position)
            assert drawn(row, numbers, "cuda") == [host_draw(row, numbers), 0], numbers


@pytest.mark.gpu
@pytest.mark.parametrize("filtered", [False, True])
def test_recorded_launches_draw_with_what_lies_there_when_they_are_replayed(
    filtered: bool,
) -> None:
    logits = torch.zeros(VOCABULARY, device="cuda")
    best = torch.zeros(2, dtype=torch.int64, device="cuda")
    numbers = torch.zeros(5, dtype=torch.int64, device="cuda")
    out = torch.zeros(2, dtype=torch.int64).pin_memory()

    def launch() -> None:
        likeliest(logits, out=best)
        draw(logits, best, numbers, filtered=filtered, out=out)

    numbers.copy_(page(draw_numbers(Sampling(), 0)))
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for turn in range(20):
        row = hard_row(KINDS[turn % len(KINDS)], VOCABULARY, turn)
        own = FILTERS[turn % len(FILTERS)] if filtered else Sampling(min_p=turn / 100)
        wanted = draw_numbers(own, turn)
        logits.copy_(torch.from_numpy(row))
        numbers.copy_(page(wanted))
        graph.replay()
        torch.cuda.synchronize()
        assert out.tolist() == [host_draw(row, wanted), 0]


def test_what_does_not_fit_is_refused() -> None:
    logits, two, five = torch.zeros(9), torch.zeros(2).long(), torch.zeros(5).long()
    for wrong in (logits.double(), logits[::2], logits.view(3, 3)):
        with pytest.raises(ValueError, match=r"logits (are|.*contiguous)"):
            draw(wrong, two, five, filtered=False)
    with pytest.raises(ValueError, match="0 logits"):
        draw(torch.zeros(0), two, five, filtered=False)
    with pytest.raises(ValueError, match=r"likeliest \("):
        draw(logits, two.int(), five, filtered=False)
    with pytest.raises(ValueError, match=r"numbers \("):
        draw(logits, two, two, filtered=False)
    with pytest.raises(ValueError, match=r"out \("):
        draw(logits, two, five, filtered=False, out=five)


@pytest.mark.gpu
def test_memory_that_a_gpu_cannot_reach_is_refused() -> None:
    logits, two = torch.zeros(9, device="cuda"), torch.zeros(2, device="cuda").long()
    with pytest.raises(ValueError, match="page-locked"):
        draw(logits, two, torch.zeros(5).long(), filtered=False)
