"""Recordings: made while the step runs eagerly, thrown away when pointers change."""

from __future__ import annotations

import pytest
import torch

from compute.graph.recording import GraphCounters, Recorder

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
    recorder.check((1, 2))
    recorder.run("a", lambda: ran.append("old"))
    recorder.check((1, 2))
    recorder.run("a", lambda: ran.append("new"))
    recorder.check((1, 3))
    recorder.run("a", lambda: ran.append("new"))
    assert ran == ["old", "old", "new"]
    assert counters.recaptures == 1


def test_a_capture_that_fails_ends_capturing_but_not_the_token(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counters, ran = GraphCounters(), []
    recorder = Recorder(CPU, counters)
    recorder.run("kept", lambda: ran.append("kept"))

    def fail(_launch: object) -> None:
        raise RuntimeError("no memory for a graph\nand much more text")

    monkeypatch.setattr(recorder, "_captured", fail)
    recorder.run("b", lambda: ran.append("b"))
    recorder.run("b", lambda: ran.append("b"))
    recorder.run("kept", lambda: ran.append("never"))
    assert ran == ["kept", "b", "b", "kept"]
    assert (counters.failures, counters.replays) == (1, 1)
    assert [record.getMessage() for record in caplog.records] == [
        "a CUDA graph could not be captured, going on without new ones: no memory for a graph"
    ]
