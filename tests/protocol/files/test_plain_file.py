"""Only plain files are opened, and nothing else is waited for or even opened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from protocol.files.plain_file import MOST_PATH_BYTES, check_path, open_plain, read_first


def test_a_plain_file_is_read_as_far_as_it_goes(tmp_path):
    path = tmp_path / "it"
    descriptor = open_plain(path, os.O_RDWR | os.O_CREAT, where="here")
    assert path.stat().st_mode & 0o777 == 0o600
    os.write(descriptor, b"0123456789")
    assert (read_first(descriptor, 4), read_first(descriptor, 99)) == (b"0123", b"0123456789")
    os.close(descriptor)


def test_a_short_read_is_read_on(tmp_path, monkeypatch):
    path = tmp_path / "it"
    path.write_bytes(b"0123456789")
    descriptor = open_plain(path, where="here")
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n_bytes, place: pread(fd, min(n_bytes, 3), place))
    assert read_first(descriptor, 8) == b"01234567"
    os.close(descriptor)


def test_what_is_no_plain_file_is_not_opened(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    opened: list[object] = []
    monkeypatch.setattr(os, "open", lambda path, *_: opened.append(path))
    for path, text in (
        (tmp_path / "pipe", "^here: not a plain file$"),
        (tmp_path / "link", "^here: not a plain file$"),
        (tmp_path, "^here: Is a directory$"),
    ):
        with pytest.raises(ConfigError, match=text):
            open_plain(path, where="here")
    assert opened == []


def test_what_took_a_files_place_is_closed_again(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    before = os.listdir("/proc/self/fd")  # noqa: PTH208  names are enough
    monkeypatch.setattr(Path, "exists", lambda _path: False)
    with pytest.raises(ConfigError, match="not a plain file"):
        open_plain(tmp_path / "pipe", where="here")
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208


@pytest.mark.parametrize("text", ["a\0b", "a\nb", "a\x1b[2J", "a\x7f", "a\x85", "a\udcff"])
def test_a_path_has_no_control_characters(text):
    with pytest.raises(
        ConfigError, match=r"^trace 'a.*: a path has no control characters"
    ) as caught:
        check_path("a" * 200 + text, "trace")
    assert len(str(caught.value)) < 300


def test_a_path_has_a_length_that_the_kernel_takes():
    check_path("é" * (MOST_PATH_BYTES // 2))
    with pytest.raises(ConfigError, match="at most 4095 bytes"):
        check_path("é" * (MOST_PATH_BYTES // 2 + 1))
