from __future__ import annotations

from pathlib import Path

import pytest

import expert_daemon.tuning
import headrace
from expert_daemon.tuned import NAME
from tests.support.fake_checkpoint import write_fake_checkpoint


def model_of_larger_experts(path: Path) -> Path:
    return write_fake_checkpoint(
        path, n_layers=3, n_experts=2, top_k=1, hidden_size=1024, expert_width=704
    )


def test_what_small_experts_measured_is_shown_and_not_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert headrace.main(["tune", "demo", "--seconds", "0.1", "--state-dir", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert "ms a layer's picks" in told.out
    assert "Not kept: an expert of 25.5 KiB says nothing about larger ones." in told.out + told.err
    assert list(tmp_path.iterdir()) == []


def test_what_experts_of_a_mebibyte_measured_is_kept(tmp_path: Path):
    model = model_of_larger_experts(tmp_path / "model")
    state_dir = tmp_path / "state"
    flags = ["--seconds", "0.1", "--state-dir", str(state_dir)]
    assert headrace.main(["tune", str(model), *flags]) == 0
    assert [path.name for path in state_dir.iterdir()] == [NAME]


def test_a_state_directory_that_cannot_be_written_is_told_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    model = model_of_larger_experts(tmp_path / "model")
    monkeypatch.setattr(expert_daemon.tuning, "tune", lambda *_, **__: pytest.fail("measured"))
    assert headrace.main(["tune", str(model), "--state-dir", "/proc/nope"]) == 2
    told = capsys.readouterr().err
    assert "--state-dir /proc/nope: cannot be written: " in told
    assert told.endswith("; --no-save measures only\n")
