"""Files replaced whole, and the leftovers of writers that were killed."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from expert_daemon.log import flush
from expert_daemon.model_state import ModelState
from expert_daemon.whole_file import remove_leftovers, replace_file

pytestmark = pytest.mark.timeout(30)

MODEL = b"m" * 16
WRITER = """
import sys
from pathlib import Path
from expert_daemon import whole_file
def stop(descriptor):
    print("there", flush=True)
    sys.stdin.read(1)
whole_file.os.fsync = stop
whole_file.replace_file(Path(sys.argv[1]), b"new")
"""


@pytest.fixture
def writer(tmp_path):
    """A process that has written the new content and not yet given it its name."""
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "hot")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout
    assert child.stdout.readline() == b"there\n"
    yield child
    child.kill()
    child.communicate()


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_the_leftover_of_a_killed_writer_goes_and_the_file_of_a_living_one_stays(
    tmp_path, writer, capfd
):
    (tmp_path / "hot.4321.new").write_bytes(b"of a daemon that wrote no lock")
    remove_leftovers(tmp_path)
    (name,) = names(tmp_path)
    assert name.startswith("hot.")
    assert name != "hot.4321.new"
    writer.kill()
    writer.wait()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == []
    flush()
    assert capfd.readouterr().err.count("whoever wrote it was killed") == 2


def test_a_living_writer_ends_well_beside_one_that_removes(tmp_path, writer):
    remove_leftovers(tmp_path)
    writer.communicate(b"x")
    assert writer.returncode == 0
    assert names(tmp_path) == ["hot"]
    assert (tmp_path / "hot").read_bytes() == b"new"


def test_one_whose_file_was_removed_before_it_was_locked_makes_another(tmp_path, monkeypatch):
    lock = fcntl.flock
    locked: list[int] = []

    def late(descriptor, how):
        if not locked:
            Path(f"/proc/self/fd/{descriptor}").readlink().unlink()
        locked.append(how)
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    replace_file(tmp_path / "hot", b"content")
    assert len(locked) == 2
    assert names(tmp_path) == ["hot"]
    assert (tmp_path / "hot").read_bytes() == b"content"


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch):
    replace_file(tmp_path / "hot", b"old")

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(tmp_path / "hot", b"new")
    assert names(tmp_path) == ["hot"]
    assert (tmp_path / "hot").read_bytes() == b"old"


def test_other_files_and_pipes_stay(tmp_path):
    os.mkfifo(tmp_path / "hot.1.new")
    (tmp_path / "aim").write_bytes(b"")
    (tmp_path / "hot.2.new").symlink_to(tmp_path / "aim")
    (tmp_path / "hot").write_bytes(b"")
    (tmp_path / "other.json.1.new").write_bytes(b"")
    remove_leftovers(tmp_path, "hot")
    remove_leftovers(tmp_path / "nowhere")
    assert names(tmp_path) == ["aim", "hot", "hot.1.new", "hot.2.new", "other.json.1.new"]


def test_a_daemon_removes_leftovers_at_its_start_unless_it_may_not_save(state_dir):
    state = ModelState(state_dir, MODEL, 5)
    state.write("hot", b"abc")
    left = state.directory / "hot.99.new"
    left.write_bytes(b"half")
    ModelState(state_dir, MODEL, 5, save=False)
    assert left.exists()
    assert ModelState(state_dir, MODEL, 5).read("hot") == b"abc"
    assert names(state.directory) == ["hot"]
