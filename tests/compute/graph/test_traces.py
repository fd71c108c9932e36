"""What a step prints when asked: hashes, timings, counts and misses."""

from __future__ import annotations

import re

import pytest
import torch

from compute.graph.hashes import Tracer
from compute.graph.timings import PARTS, StepTimer
from tests.support.decode_rig import Rig, make_rig
from tests.support.in_turn import in_turn

PROMPT = [3, 911, 17, 2045]
LINE = re.compile(
    r"position (\d+) layers (\d+)\.\.(\d+) streams ([0-9a-f]{16}) hidden ([0-9a-f]{16})"
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def steps(made: Rig, n: int, token: int = 42) -> list[int]:
    made.prefill(PROMPT)
    ids = made.greedy(n, token)
    made.runner.finish()
    return ids


def hashes_of(lines: list[str]) -> dict[tuple[int, int], tuple[str, str]]:
    """By position and last layer: hashes of streams and of hidden."""
    found = {}
    for line in lines:
        match = LINE.fullmatch(line)
        assert match, line
        position, _, last, streams, hidden = match.groups()
        found[int(position), int(last)] = (streams, hidden)
    return found


@pytest.mark.parametrize("device", DEVICES)
@in_turn(boundaries=["auto", "whole", "source-layers"], n_slots=[256, 60])
def test_a_segments_line_is_the_eager_line_of_its_last_layer(
    device: str, boundaries: str, n_slots: int
) -> None:
    eager: list[str] = []
    steps(make_rig(device, mode="eager", boundaries=boundaries, tracer=Tracer(eager.append)), 4)
    segment: list[str] = []
    made = make_rig(
        device, mode="segment", boundaries=boundaries, n_slots=n_slots,
        tracer=Tracer(segment.append),
    )  # fmt: skip
    steps(made, 4)
    assert (made.runner.counters.misses > 0) == (n_slots < 256)
    wanted = hashes_of(eager)
    assert len(wanted) == 4 * 8
    found = hashes_of(segment)
    assert found == {place: wanted[place] for place in found}
    assert (
        len({last for _, last in found}) == {"auto": 1, "whole": 1, "source-layers": 4}[boundaries]
        or boundaries == "auto"
    )
    assert {last for _, last in found} >= {7}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["eager", "layer", "segment", "oracle"])
def test_timings_are_a_line_a_token_and_change_no_bit(device: str, mode: str) -> None:
    lines: list[str] = []
    timer = StepTimer(torch.device(device), lines.append)
    made = make_rig(device, mode=mode, n_slots=60, timer=timer)
    plain = make_rig(device, mode="eager")
    assert steps(made, 5) == steps(plain, 5)
    number = r"-?[0-9.]+"
    parts = ", ".join(f"{name} ({number})" for name in PARTS)
    line = re.compile(rf"timings: position (\d+): ({number}) ms: {parts}, other ({number})")
    found = [line.fullmatch(text) for text in lines]
    assert all(found), lines
    positions = [int(match[1]) for match in found if match]
    assert positions == list(range(len(PROMPT), len(PROMPT) + 5))
    for match in found:
        assert match is not None
        total, *parts_ms, other = (float(text) for text in match.groups()[1:])
        assert abs(total - sum(parts_ms) - other) < 0.02
        of = dict(zip(PARTS, parts_ms, strict=True))
        assert min(of["compute"], of["attention"], of["sampling"], of["fetch"]) > 0


def test_counts_are_a_line_every_32_tokens() -> None:
    lines: list[str] = []
    made = make_rig(mode="segment", boundaries="whole", log=lines.append)
    made.prefill(PROMPT)
    made.greedy(65)
    assert len(lines) == 3
    assert all(line.startswith("graphs: ") for line in lines)


def test_a_miss_is_a_line_and_counts_run_on() -> None:
    lines: list[str] = []
    made = make_rig(mode="segment", boundaries="whole", log=lines.append)
    made.prefill(PROMPT)
    made.runner.step(7)
    picks = made.runner._headers.all_picks()
    made.daemon.drop(3, int(picks[3, 0]))
    made.runner.sequence.position -= 1
    made.runner.step(7)
    assert lines[0].startswith("graphs: 4 launches, 0 replays, 4 eager, 0 layers repeated")
    assert lines[1:] == [f"miss: position 4 layer 3, segment to 7: experts {picks[3, 0]}"]


def test_nothing_is_measured_that_was_not_asked_for() -> None:
    made = make_rig(mode="layer")
    steps(made, 3)
    assert made.runner._timer is None
    assert {key[0] for key in made.runner._launches._recorder._recordings} == {"layers"}  # type: ignore[index]
