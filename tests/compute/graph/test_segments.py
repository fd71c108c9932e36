"""Where segments end, and how their length follows the misses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compute.graph.segments import KINDS, Boundaries, MissRate, pieces
from protocol.files.checkpoint import open_checkpoint, resolve_model

CONFIG = open_checkpoint(resolve_model("demo")).config


def test_segments_are_of_one_length_but_for_a_short_ones_first() -> None:
    assert Boundaries.of(CONFIG, "auto").segments(8) == [(0, 8)]
    assert Boundaries(40, (0,), True).segments(16) == [(0, 16), (16, 32), (32, 40)]
    assert Boundaries.of(CONFIG, "auto").segments(3) == [(0, 4), (4, 7), (7, 8)]
    assert Boundaries.of(CONFIG, "auto").segments(1) == [(0, 4), (4, 5), (5, 6), (6, 7), (7, 8)]


def test_pieces_begin_with_a_layer_and_double() -> None:
    assert pieces(0, 40) == [(0, 1), (1, 3), (3, 7), (7, 15), (15, 31), (31, 40)]
    assert pieces(5, 7) == [(5, 6), (6, 7)]
    assert pieces(3, 3) == []


def test_a_whole_step_is_one_segment_whatever_the_length() -> None:
    assert Boundaries.of(CONFIG, "whole").segments(2) == [(0, 8)]


def test_source_layers_begin_segments() -> None:
    found = Boundaries.of(CONFIG, "source-layers").segments(1)
    assert found == [(0, 2), (2, 5), (5, 7), (7, 8)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2, 3, 5, 40])
def test_segments_cover_every_layer_once(kind: str, length: int) -> None:
    config = replace(CONFIG, engram_layers=())
    for boundaries in (Boundaries.of(CONFIG, kind), Boundaries.of(config, kind)):
        layers = [n for first, end in boundaries.segments(length) for n in range(first, end)]
        assert layers == list(range(8))


def test_segments_are_long_without_misses_and_short_with_many() -> None:
    rate = MissRate(Boundaries(40, (0, 1), True))
    assert rate.length() == 40
    lengths = []
    for _ in range(200):
        rate.note(20)
        lengths.append(rate.length())
    assert lengths[-1] == 1
    assert lengths == sorted(lengths, reverse=True)
    for _ in range(600):
        rate.note(0)
    assert rate.length() == 40


def test_segments_of_one_layer_are_for_many_misses() -> None:
    """Beside one layer the host has no time for all that it does at a boundary."""
    rate = MissRate(Boundaries(40, (0,), True))
    found = []
    for n_misses in (0, 1, 2, 6, 12, 40):
        rate.assume(n_misses)
        found.append(rate.length())
    assert found == [40, 2, 2, 2, 1, 1]


def test_a_rate_may_be_assumed() -> None:
    rate, other = (MissRate(Boundaries(40, (0, 1), True)) for _ in range(2))
    rate.assume(20)
    for _ in range(600):
        other.note(20)
    assert rate.length() == other.length() == 1
