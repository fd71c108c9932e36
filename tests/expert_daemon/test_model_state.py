from __future__ import annotations

import os

import numpy as np
import pytest

from expert_daemon.checksums import Checksums
from expert_daemon.copies import MIRROR
from expert_daemon.log import flush
from expert_daemon.model_state import ModelState, pack_state, shards_stamp, unpack_state
from expert_daemon.quarantine import Entry, Quarantine
from protocol.files.safetensors_index import Shard

MODEL, OTHER = b"m" * 16, b"o" * 16


def test_what_was_written_reads_back(state_dir):
    state = ModelState(state_dir, MODEL, 5)
    assert state.read("checksums") is None
    assert state.write("checksums", b"abc")
    assert ModelState(state_dir, MODEL, 5).read("checksums") == b"abc"
    assert [path.name for path in state.directory.iterdir()] == ["checksums"]


def test_another_model_finds_nothing_and_changed_shards_void_what_was_true_of_them(
    state_dir, capfd
):
    ModelState(state_dir, MODEL, 5).write("hot", b"abc")
    assert ModelState(state_dir, OTHER, 5).read("hot") is None
    changed = ModelState(state_dir, MODEL, 6)
    assert changed.read("hot") is None
    flush()
    assert "the shards have changed since" in capfd.readouterr().err
    assert changed.read("hot", stamped=False) == b"abc"


@pytest.mark.parametrize("at", [0, 9, 14, 30, 45, 55, -1])
def test_a_damaged_file_counts_as_absent(state_dir, at, capfd):
    state = ModelState(state_dir, MODEL, 5)
    state.write("checksums", b"content")
    path = state.directory / "checksums"
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    found = state.read("checksums")
    assert found is None
    path.write_bytes(raw[:20])
    assert state.read("checksums") is None
    flush()
    assert "not used" in capfd.readouterr().err


def test_a_file_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="wanted hot"):
        unpack_state("hot", MODEL, pack_state("checksums", MODEL, 1, b""))


def test_one_that_may_not_save_writes_nothing(state_dir):
    state = ModelState(state_dir, MODEL, 5, save=False)
    assert not state.write("checksums", b"abc")
    assert list(state_dir.iterdir()) == []


def test_a_state_directory_that_cannot_be_written_is_logged_once(tmp_path, capfd):
    file = tmp_path / "file"
    file.write_text("no directory")
    state = ModelState(file, MODEL, 5)
    assert not state.write("checksums", b"abc")
    assert not state.write("checksums", b"abc")
    flush()
    assert capfd.readouterr().err.count("not saved") == 1


def test_the_stamp_changes_with_a_shards_size_or_time(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"12345")
    shards = [Shard(path, 5)]
    first = shards_stamp(shards)
    assert shards_stamp(shards) == first
    os.utime(path, ns=(1, 1))
    assert shards_stamp(shards) != first


def test_the_first_checksum_stays_and_is_saved(state_dir):
    state = ModelState(state_dir, MODEL, 5)
    checksums = Checksums(2, 3, state)
    assert checksums.learn(1, 2, 99) == 99
    assert checksums.learn(1, 2, 98) == 99
    checksums.save()
    again = Checksums(2, 3, ModelState(state_dir, MODEL, 5))
    assert again.known(1, 2) == 99
    assert again.n_known == 1
    again.forget(1, 2)
    assert again.learn(1, 2, 98) == 98
    changed = Checksums(2, 3, ModelState(state_dir, MODEL, 6))
    assert changed.n_known == 0


def test_nothing_is_written_where_nothing_changed(state_dir):
    state = ModelState(state_dir, MODEL, 5)
    checksums = Checksums(2, 3, state)
    checksums.save()
    assert not state.directory.exists()
    checksums.learn(0, 0, 1)
    checksums.save()
    written = (state.directory / "checksums").stat().st_mtime_ns
    checksums.save()
    assert (state.directory / "checksums").stat().st_mtime_ns == written


def test_a_sources_own_checksums_hold_and_are_not_saved(state_dir):
    state = ModelState(state_dir, MODEL, 5)
    source = np.array([[1, 2], [3, 0]], np.uint64)
    checksums = Checksums(2, 2, state, source)
    assert checksums.learn(0, 1, 77) == 2
    checksums.forget(0, 1)
    assert checksums.known(0, 1) == 2
    assert checksums.learn(1, 1, 77) == 77
    checksums.save()
    assert not state.directory.exists()


def test_a_quarantine_outlives_the_daemon_until_it_is_lifted(state_dir, capfd):
    def state():
        return ModelState(state_dir, MODEL, 5)

    quarantine = Quarantine(4, 4, state())
    entry = Entry(3, 1, "/m/a.safetensors", 4096, "layer 3 expert 1: /m/a: read twice")
    quarantine.add(entry)
    quarantine.add(Entry(3, 1, "/m/other", 1, "later"))
    assert not state_dir.joinpath(MODEL.hex()).exists()  # no file I/O where it is called
    assert quarantine.changed.is_set()
    quarantine.save()
    flush()
    assert capfd.readouterr().err == "quarantined: layer 3 expert 1: /m/a: read twice\n"
    again = Quarantine(4, 4, state())
    assert again.entries() == [entry]
    assert Quarantine(2, 4, state()).entries() == []
    assert again.lift([(3, 1), (0, 0)]) == [(3, 1)]
    assert again.changed.is_set()
    again.save()
    assert len(Quarantine(4, 4, state())) == 0


def test_a_quarantine_that_could_not_be_saved_is_tried_again_and_one_that_was_is_not(state_dir):
    state = ModelState(state_dir, MODEL, 5)
    quarantine = Quarantine(4, 4, state)
    quarantine.add(Entry(3, 1, "/m/a", 0, "read twice"))
    state.directory.write_text("no directory")
    quarantine.save()
    state.directory.unlink()
    quarantine.save()
    (path,) = state.directory.iterdir()
    path.unlink()
    quarantine.save()
    assert not path.exists()


def test_the_copies_of_an_expert_are_quarantined_each_and_lifted_together(state_dir):
    state = ModelState(state_dir, MODEL, 5)
    quarantine = Quarantine(4, 4, state)
    home = Entry(3, 1, "/m/a.pack", 4096, "read twice")
    mirror = Entry(3, 1, "/n/a.pack", 4096, "read twice", MIRROR)
    quarantine.add(mirror)
    quarantine.add(home)
    quarantine.save()
    again = Quarantine(4, 4, state)
    assert again.of_key((3, 1)) == [home, mirror]
    assert again.of_key((3, 2)) == []
    assert again.lift([(3, 1)]) == [(3, 1)]
    assert again.entries() == []
