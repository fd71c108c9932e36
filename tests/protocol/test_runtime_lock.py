from __future__ import annotations

import os

import pytest

from protocol.errors import ConfigError
from protocol.runtime_lock import RuntimeLock, prepare_directory


def test_a_second_lock_is_refused_naming_the_holder(runtime_dir):
    path = runtime_dir / "expertd.lock"
    lock = RuntimeLock(path)
    with pytest.raises(ConfigError, match=rf"another expert daemon \(pid {os.getpid()}\)"):
        RuntimeLock(path)
    lock.close()
    assert path.exists()
    RuntimeLock(path).close()


def test_a_directory_is_made_private(runtime_dir):
    path = runtime_dir / "a" / "b"
    prepare_directory(path)
    assert path.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_others_may_write_is_refused(runtime_dir):
    path = runtime_dir / "shared"
    path.mkdir()
    path.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write there"):
        prepare_directory(path)


def test_a_file_in_place_of_the_directory_is_refused(runtime_dir):
    path = runtime_dir / "file"
    path.write_text("")
    with pytest.raises(ConfigError, match="cannot be made a directory"):
        prepare_directory(path)
