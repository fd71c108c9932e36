from __future__ import annotations

import json
from dataclasses import replace

import pytest

from expert_daemon.file_system import FileSystem, file_system_of
from expert_daemon.tuned import (
    NAME,
    SAFE,
    Material,
    Reading,
    choose_reading,
    fits_in_memory,
    load_tuned,
    machine_name,
    store_tuned,
)
from expert_daemon.tuning import WORTH, Try, _better, _first_good, measure, tune
from protocol.files.checkpoint import open_checkpoint
from protocol.files.safetensors_index import Shard
from tests.support.fake_checkpoint import write_fake_checkpoint

SLOT = 18_800_640
DISK = Material(FileSystem("ext4", "/dev/sda1"), SLOT, fits=False)
NET = Material(FileSystem("nfs4", "host:/models"), SLOT, fits=False)
SMALL = replace(DISK, fits=True)  # a model that fits in memory
DIRECT = Reading("direct", 16, 1 << 21, 4)
BUFFERED = Reading("buffered", 4, 1 << 20, 8)


def store(state_dir, on=DISK, direct=DIRECT, buffered=None):
    return store_tuned(state_dir, on, direct=direct, buffered=buffered, figures={"x": 1})


def test_without_tuning_the_defaults_are_safe(state_dir):
    assert choose_reading(state_dir, SMALL).reading == SAFE
    assert "headrace tune" in choose_reading(state_dir, SMALL).why
    on_net = choose_reading(state_dir, NET)
    assert on_net.reading.mode == "buffered"
    assert "nfs4" in on_net.why


def test_what_was_measured_holds_for_this_machine_and_file_system(state_dir, monkeypatch):
    store(state_dir)
    assert load_tuned(state_dir, DISK) == DIRECT
    assert load_tuned(state_dir, NET) is None
    choice = choose_reading(state_dir, DISK)
    assert (choice.reading, choice.why) == (DIRECT, "as measured by headrace tune")
    monkeypatch.setattr("expert_daemon.tuned.machine_name", lambda: "another")
    assert load_tuned(state_dir, DISK) is None


def test_the_page_cache_is_used_only_for_models_that_fit_in_memory(state_dir):
    store(state_dir, buffered=BUFFERED)
    assert load_tuned(state_dir, SMALL) == BUFFERED
    assert load_tuned(state_dir, DISK) == DIRECT


def test_what_is_asked_for_wins(state_dir):
    store(state_dir)
    choice = choose_reading(state_dir, DISK, mode="buffered", threads=3)
    assert (choice.reading.mode, choice.reading.threads) == ("buffered", 3)
    assert choice.reading.max_parts == 4
    assert choice.why == "as asked for"


def test_entries_of_other_file_systems_stay(state_dir):
    store(state_dir)
    store(state_dir, NET, BUFFERED)
    store(state_dir, direct=SAFE)
    assert load_tuned(state_dir, NET) == BUFFERED
    assert load_tuned(state_dir, DISK) == SAFE


READING = {"mode": "direct", "threads": 9, "cut_bytes": 4096, "max_parts": 1}


def entry(**changes):
    return {"slot_bytes": SLOT, "direct": READING | changes, "buffered": None}


@pytest.mark.parametrize(
    "found",
    [
        3,
        {"direct": READING},
        entry(mode="mmap"),
        entry(threads=0),
        entry(threads="many"),
        entry(cut_bytes=100),
        entry(max_parts=1000),
    ],
)
def test_a_damaged_entry_is_no_reason_not_to_start(state_dir, found):
    key = f"{machine_name()} {DISK.on.name}"
    (state_dir / NAME).write_text(json.dumps({key: found}))
    assert choose_reading(state_dir, SMALL).reading == SAFE
    store(state_dir)
    assert load_tuned(state_dir, SMALL) == DIRECT


@pytest.mark.parametrize("content", ["not json", "[]", ""])
def test_a_damaged_store_is_no_reason_not_to_start(state_dir, content):
    (state_dir / NAME).write_text(content)
    assert choose_reading(state_dir, SMALL).reading == SAFE
    store(state_dir)
    assert load_tuned(state_dir, SMALL) == DIRECT


def test_the_store_is_plain_json_with_what_was_measured(state_dir):
    path = store(state_dir)
    (entry,) = json.loads(path.read_text()).values()
    assert entry["figures"] == {"x": 1}
    assert entry["direct"]["threads"] == 16


def test_a_model_fits_beside_an_arena_as_large(tmp_path):
    shards = [Shard(tmp_path / "a", 30), Shard(tmp_path / "b", 20)]
    assert fits_in_memory(shards, 100)
    assert not fits_in_memory(shards, 99)


def test_what_was_measured_with_experts_of_another_size_is_void(state_dir):
    store(state_dir)
    assert load_tuned(state_dir, replace(DISK, slot_bytes=SLOT // 3)) == DIRECT
    assert load_tuned(state_dir, replace(DISK, slot_bytes=28_672)) is None


# file systems

MOUNTS = r"""22 1 253:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:25 / /mnt/net\040drive rw - nfs4 host:/models rw,vers=4
31 22 253:0 /data /mnt/bind rw - ext4 /dev/vda rw
broken line
"""


def test_the_file_system_of_a_path_is_that_of_its_mount(tmp_path, monkeypatch):
    root = "/"
    found = file_system_of(tmp_path, MOUNTS.replace("253:0", "9999:9"))
    assert found == FileSystem("ext4", "/dev/vda"), root
    found = file_system_of(tmp_path, MOUNTS.replace(r"/mnt/net\040drive", str(tmp_path)))
    assert found == FileSystem("nfs4", "host:/models")
    assert found.is_network
    assert not file_system_of(tmp_path, "").is_network


def test_this_machines_own_mounts_are_understood(tmp_path):
    assert file_system_of(tmp_path).kind
    with pytest.raises(OSError, match="nowhere"):
        file_system_of(tmp_path / "nowhere")


# measuring


def attempt(threads, cost):
    return Try(Reading(threads=threads), cost, 0.0, 1.0)


def test_more_threads_must_be_worth_it():
    tries = [attempt(1, 10.0), attempt(2, 5.1), attempt(4, 5.0), attempt(8, 6.0)]
    assert _first_good(tries).reading.threads == 2
    assert 5.1 * WORTH <= 5.0
    assert _better(tries[2], [attempt(16, 4.9)]) is tries[2]
    assert _better(tries[2], [attempt(16, 4.0)]).reading.threads == 16
    assert _better(tries[2], []) is tries[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    return open_checkpoint(write_fake_checkpoint(directory, n_layers=6, n_experts=16, top_k=2))


def test_a_measurement_reads_as_the_daemon_does(checkpoint):
    for mode in ("direct", "buffered"):
        found = measure(checkpoint, Reading(mode=mode, threads=2), 0.02)
        assert found.layer_ms > 0
        assert found.expert_ms > 0
        assert found.bytes_per_s > 0


def test_tuning_tries_the_page_cache_only_where_the_model_fits(checkpoint):
    told: list[Try] = []
    found = tune(checkpoint, available_bytes=0, seconds=0.1, told=told.append)
    assert not found.fits_in_memory
    assert found.buffered is None
    assert found.best is found.direct
    assert told == list(found.tries)
    assert {one.reading.mode for one in told} == {"direct"}
    found = tune(checkpoint, available_bytes=1 << 40, seconds=0.1)
    assert found.fits_in_memory
    assert {one.reading.mode for one in found.tries} == {"direct", "buffered"}
