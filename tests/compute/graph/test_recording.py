"""Recordings: made while the step runs eagerly, thrown away when pointers change."""

from __future__ import annotations

import pytest
import torch

from compute.graph.recording import GraphCounters, Recorder
from protocol.errors import CaptureError

CPU = torch.device("cpu")


def test_the_first_run_is_eager_and_the_next_a_replay() -> None:
    counters, ran = GraphCounters(), []
    recorder = Recorder(CPU, counters)
    for _ in range(3):
        recorder.run("a", lambda: ran.append(1))
    assert len(ran) == 3
    assert (counters.eager, counters.captures, counters.replays) == (1, 1, 2)


def test_changed_pointers_throw_every_recording_away() -> None:
    counters, ran = GraphCounters(), []
    recorder = Recorder(CPU, counters)
    recorder.check("ring", (1, 2))
    recorder.run("a", lambda: ran.append("old"))
    recorder.check("ring", (1, 2))
    recorder.run("a", lambda: ran.append("new"))
    recorder.check("ring", (1, 3))
    recorder.run("a", lambda: ran.append("new"))
    assert ran == ["old", "old", "new"]
    assert counters.recaptures == 1
    assert counters.reasons == {"ring": 1}
    assert "1 recaptures (ring 1)" in counters.line()


def failing(_launch: object) -> None:
    raise CaptureError("no memory for a graph")


def test_a_capture_that_fails_ends_capturing_but_not_the_token(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counters, ran = GraphCounters(), []
    recorder = Recorder(CPU, counters)
    recorder.run("kept", lambda: ran.append("kept"))
    monkeypatch.setattr(recorder, "_captured", failing)
    recorder.run("b", lambda: ran.append("b"))
    recorder.run("b", lambda: ran.append("b"))
    recorder.run("kept", lambda: ran.append("never"))
    assert ran == ["kept", "b", "b", "kept"]
    assert (counters.failures, counters.replays) == (1, 1)
    assert [record.getMessage() for record in caplog.records] == [
        "a CUDA graph could not be captured, going on without new ones: no memory for a graph"
    ]


def test_where_graphs_are_not_kept_a_failed_capture_ends_all_of_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counters, ran = GraphCounters(), []
    recorder = Recorder(CPU, counters, keeps=False)
    recorder.run("a", lambda: ran.append("old"))
    monkeypatch.setattr(recorder, "_captured", failing)
    recorder.run("b", lambda: ran.append("b"))
    recorder.run("a", lambda: ran.append("new"))
    assert ran == ["old", "b", "new"]
    assert (counters.failures, counters.replays) == (1, 0)
    assert len(caplog.records) == 1
    assert "segments are off" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("keeps", [True, False])
def test_a_launch_that_cannot_be_captured_leaves_the_device_as_it_was(keeps: bool) -> None:
    device = torch.device("cuda")
    counters, total = GraphCounters(), torch.zeros(1, device=device)
    recorder = Recorder(device, counters, keeps=keeps)
    before = torch.cuda.current_stream()

    def add() -> None:
        total.add_(1)

    def add_and_look() -> None:
        total.add_(1)
        assert total.item() > 0  # waits for the device, which a capture does not allow

    recorder.run("add", add)
    recorder.run("look", add_and_look)
    assert torch.cuda.current_stream() == before
    for _ in range(3):
        recorder.run("look", add_and_look)
        recorder.run("add", add)
    assert total.item() == 8
    assert (counters.captures, counters.failures) == (1, 1)
    assert counters.replays == (3 if keeps else 0)
