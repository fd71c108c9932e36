"""The file of `--predict-trace` and who goes on in it."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import numpy as np
import pytest

from compute.graph import guess_writer
from compute.graph.guess_writer import MOST_WAITING, GuessWriter
from protocol.errors import ConfigError
from protocol.files.guess_format import HEADER_BYTES, GuessShape, decode_blocks

SHAPE = GuessShape(2, 9, 3)
PICKS = np.array([[1, 2, 3], [4, 5, 8]])
GUESSES = np.full((2, 3, 3), -1, np.int32)
GUESSES[1, 0] = [0, 4, 8]


def write(path: Path, *positions: int, max_bytes: int = 1 << 20) -> GuessWriter:
    writer = GuessWriter(path, SHAPE, max_bytes=max_bytes)
    for position in positions:
        writer.take(position, PICKS, GUESSES)
        writer.flush()
    return writer


def positions(path: Path) -> list[int]:
    found: list[int] = decode_blocks(path.read_bytes(), SHAPE).records["position"].tolist()
    return found


def test_a_successor_goes_on_after_a_cut_at_any_byte(tmp_path: Path) -> None:
    path = tmp_path / "guesses"
    write(path, 0, 1, 2)
    data = path.read_bytes()
    one = (len(data) - HEADER_BYTES) // 3
    for size in range(len(data)):
        path.write_bytes(data[:size])
        write(path, 9)
        n_whole = max(0, (size - HEADER_BYTES) // one)
        assert positions(path) == [*range(n_whole), 9]


def test_tokens_are_written_in_blocks_and_at_the_latest_by_flush(tmp_path: Path) -> None:
    writer = write(tmp_path / "guesses")
    for position in range(MOST_WAITING + 1):
        writer.take(position, PICKS, GUESSES)
    assert len(positions(writer.path)) >= MOST_WAITING
    writer.flush()
    writer.flush()
    assert positions(writer.path) == list(range(MOST_WAITING + 1))


def test_another_models_file_and_other_files_are_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "guesses"
    write(path, 1)
    with pytest.raises(ConfigError, match="of another model"):
        GuessWriter(path, GuessShape(2, 10, 3))
    assert positions(path) == [1]
    other = tmp_path / "other"
    other.write_text("a letter")
    with pytest.raises(ConfigError, match="not a guess trace"):
        write(other)
    assert other.read_text() == "a letter"
    with pytest.raises(ConfigError, match="Is a directory"):
        write(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a plain file"):
        write(tmp_path / "pipe")


def test_a_full_disk_is_said_once_and_leaves_whole_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = write(tmp_path / "guesses", 1)

    def torn(descriptor: int, data: bytes) -> None:
        os.write(descriptor, data[:20])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(guess_writer, "_write", torn)
    with caplog.at_level(logging.WARNING):
        for position in (2, 3):
            writer.take(position, PICKS, GUESSES)
            writer.flush()
    (record,) = caplog.records
    assert "No space left on device; nothing more is recorded" in record.getMessage()
    found = decode_blocks(writer.path.read_bytes(), SHAPE)
    assert (found.records["position"].tolist(), found.n_bytes_torn) == ([1], 0)


def test_the_limit_ends_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        writer = write(tmp_path / "guesses", *range(40), max_bytes=1000)
    assert writer.path.stat().st_size <= 1000
    assert 0 < len(positions(writer.path)) < 40
    assert len(caplog.records) == 1
