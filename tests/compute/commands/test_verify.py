"""`headrace verify`: every flipped bit is found and named, in packs and beside kept hashes."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from protocol.files.checkpoint import open_checkpoint
from tests.support.converted_gguf import convert
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.packing import flip_bit, pack, run_command

WIDE: dict[str, Any] = {"hidden_size": 1024, "expert_width": 512}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_fake_checkpoint(tmp_path / "src", n_layers=3, n_experts=4)


def bad(directory: Path, *flags: str | Path) -> list[dict]:
    outcome = run_command("verify", directory, "--json", *flags)
    done = outcome.events[-1]
    assert done["event"] == "done"
    assert outcome.status == bool(done["bad"])
    return done["bad"]


def test_a_whole_pack_has_nothing_bad(source: Path, tmp_path: Path):
    pack(source, tmp_path / "b", "--mirror", tmp_path / "m")
    outcome = run_command("verify", tmp_path / "b")
    assert outcome.status == 0
    assert "nothing bad" in outcome.err


def test_every_bad_record_is_named(source: Path, tmp_path: Path):
    pack(source, tmp_path / "b")
    slice_map = open_checkpoint(tmp_path / "b").slice_map
    spoilt = [(0, 3), (1, 0), (2, 2)]
    for layer, expert in spoilt:
        (record,) = slice_map.slices(layer, expert)
        flip_bit(record.shard.path, record.offset + record.n_bytes - 1)
    found = bad(tmp_path / "b")
    assert [(fault["layer"], fault["expert"]) for fault in found] == spoilt
    assert all("hash" in fault["text"] for fault in found)
    assert [Path(fault["path"]).name for fault in found] == [
        f"experts-{layer:05d}.pack" for layer, _ in spoilt
    ]
    outcome = run_command("verify", tmp_path / "b", "--jobs", "1")
    assert outcome.status == 1
    assert outcome.err.count("bad: layer") == 3
    assert "layer 1 expert 0: " in outcome.err


def test_the_bad_stripe_and_the_bad_mirror_are_named(tmp_path: Path):
    source = write_fake_checkpoint(tmp_path / "src", n_layers=1, n_experts=3, **WIDE)
    drives = f"{tmp_path / 'x'},{tmp_path / 'y'}"
    pack(source, tmp_path / "b", "--stripe", drives, "--mirror", tmp_path / "m")
    slice_map = open_checkpoint(tmp_path / "b").slice_map
    second = next(part for part in slice_map.slices(0, 2) if part.shard.path.parent.name == "y")
    flip_bit(second.shard.path, second.offset + 77)
    (mirrored,) = slice_map.mirror_slices(0, 1)
    flip_bit(mirrored.shard.path, mirrored.offset + 5)
    found = bad(tmp_path / "b")
    places = [(Path(f["path"]).parent.name, f["expert"], f["n_bytes"]) for f in found]
    assert [place[:2] for place in places] == [("m", 1), ("y", 2)]
    assert all(0 < n_bytes <= 1 << 20 for *_, n_bytes in places)


@pytest.mark.parametrize("name", ["config.json", "dense-00001-of-00001.safetensors"])
def test_a_changed_plain_file_is_named(source: Path, tmp_path: Path, name: str):
    pack(source, tmp_path / "b")
    path = tmp_path / "b" / name
    flip_bit(path, path.stat().st_size - (3 if name == "config.json" else 40))
    (fault,) = bad(tmp_path / "b")
    assert fault["path"] == str(path)


@pytest.mark.parametrize("place", ["header", "index", "size", "gone"])
def test_a_damaged_record_file_is_named_and_the_rest_is_read(source, tmp_path: Path, place: str):
    pack(source, tmp_path / "b")
    path = tmp_path / "b" / "experts-00001.pack"
    if place == "header":
        flip_bit(path, 60)
    elif place == "index":
        flip_bit(path, path.stat().st_size - 9)
    elif place == "size":
        os.truncate(path, path.stat().st_size - 1)
    else:
        path.unlink()
    other = open_record(tmp_path / "b" / "experts-00002.pack")
    found = bad(tmp_path / "b")
    assert len(found) == 2
    assert {fault["path"] for fault in found} == {str(path), str(other)}


def open_record(path: Path) -> Path:
    flip_bit(path, 5000)
    return path


def test_a_changed_manifest_is_refused(source: Path, tmp_path: Path):
    pack(source, tmp_path / "b")
    path = tmp_path / "b" / "pack.json"
    raw = json.loads(path.read_text())
    raw["files"][0]["bytes"] += 1
    path.write_text(json.dumps(raw))
    outcome = run_command("verify", tmp_path / "b")
    assert outcome.status == 1
    assert "pack.json: was changed" in outcome.err


def test_a_share_is_verified_as_far_as_it_goes(source: Path, tmp_path: Path):
    pack(source, tmp_path / "b", "--layers", "1")
    assert bad(tmp_path / "b") == []


def test_kept_hashes_find_a_flipped_bit_and_its_expert(source: Path, tmp_path: Path):
    flags = ("--state-dir", tmp_path / "state")
    first = run_command("verify", source, "--json", *flags).events[-1]
    assert (first["compared_bytes"], first["recorded_files"]) == (0, 0)
    recorded = run_command("verify", source, "--json", "--record", *flags).events[-1]
    assert recorded["recorded_files"] == 3
    again = run_command("verify", source, "--json", *flags).events[-1]
    assert again["compared_bytes"] == again["bytes"] > 0
    piece = open_checkpoint(source).slice_map.slices(2, 3)[4]
    flip_bit(piece.shard.path, piece.offset)
    (fault,) = bad(source, *flags)
    assert fault["path"] == str(piece.shard.path)
    assert "more: hash" in fault["text"]  # small tensors: many lie in one part


def test_a_linked_shard_is_compared_with_kept_hashes(source: Path, tmp_path: Path):
    flags = ("--state-dir", tmp_path / "state")
    pack(source, tmp_path / "b")
    assert bad(tmp_path / "b", "--record", *flags) == []
    table = open_checkpoint(tmp_path / "b").engram_tables[0]
    flip_bit(table.values.shard.path, table.values.offset + 3)
    (fault,) = bad(tmp_path / "b", *flags)
    assert fault["path"] == str(tmp_path / "b" / "model-00003-of-00003.safetensors")


def test_a_linked_shard_is_held_to_size_header_and_time(source: Path, tmp_path: Path):
    flags = ("--state-dir", tmp_path / "state")
    pack(source, tmp_path / "b")
    name = "model-00003-of-00003.safetensors"
    outcome = run_command("verify", tmp_path / "b", *flags)
    assert outcome.status == 0
    assert f"only read: {name} (--record keeps hashes" in outcome.err
    done = run_command("verify", tmp_path / "b", "--json", *flags).events[-1]
    assert done["uncompared"] == [str(tmp_path / "b" / name)]
    assert 0 < done["compared_bytes"] < done["bytes"]
    shard = tmp_path / "b" / name
    os.utime(shard, ns=(1, 1))
    (fault,) = bad(tmp_path / "b", *flags)
    assert fault["path"] == str(shard)
    assert "was written to since it was packed" in fault["text"]
    assert bad(tmp_path / "b", "--record", *flags) == []
    assert bad(tmp_path / "b", *flags) == []  # the hashes count more than the time


def test_it_says_what_was_compared(source: Path, tmp_path: Path, demo_dir: Path):
    flags = ("--state-dir", tmp_path / "state")
    pack(source, tmp_path / "b", "--copy")
    err = run_command("verify", tmp_path / "b", *flags).err
    assert "nothing bad; every byte was compared with a hash" in err
    err = run_command("verify", demo_dir, *flags).err
    assert "nothing bad; no byte was compared, for there are no hashes of it: headers" in err
    assert "every byte can be read (--record keeps" in err
    err = run_command("verify", demo_dir, "--record", *flags).err
    assert "hashes of" in err
    err = run_command("verify", demo_dir, *flags).err
    assert "every byte was compared with a hash" in err


def test_an_empty_state_directory_name_is_refused(source: Path):
    outcome = run_command("verify", source, "--state-dir", "")
    assert outcome.status == 2
    assert "--state-dir: ''" in outcome.err


def test_damaged_kept_hashes_count_as_none(source: Path, tmp_path: Path):
    flags = ("--state-dir", tmp_path / "state")
    run_command("verify", source, "--record", *flags)
    for path in (tmp_path / "state").rglob("*.xxh3"):
        flip_bit(path, 20)
    done = run_command("verify", source, "--json", *flags).events[-1]
    assert (done["compared_bytes"], done["bad"]) == (0, [])


def test_an_unreadable_part_is_named_and_the_rest_is_read(source, tmp_path: Path, monkeypatch):
    from expert_daemon.source import FileSource

    pack(source, tmp_path / "b")
    (record,) = open_checkpoint(tmp_path / "b").slice_map.slices(1, 2)
    real = FileSource.read_into

    def read_into(self, shard, offset, memory, kind):
        hit = offset <= record.offset < offset + len(memory)
        if self.path(shard) == record.shard.path and hit:
            raise OSError(5, "Input/output error")
        return real(self, shard, offset, memory, kind)

    monkeypatch.setattr(FileSource, "read_into", read_into)
    (fault,) = bad(tmp_path / "b")
    assert (fault["layer"], fault["expert"]) == (1, 2)
    assert "EIO" in fault["text"]


@pytest.mark.timeout(20)
def test_a_read_that_never_returns_ends_it_and_is_named(source, tmp_path: Path, monkeypatch):
    from expert_daemon.source import FileSource

    pack(source, tmp_path / "b")
    (record,) = open_checkpoint(tmp_path / "b").slice_map.slices(1, 2)
    real, released = FileSource.read_into, threading.Event()

    def read_into(self, shard, offset, memory, kind):
        if self.path(shard) == record.shard.path:
            released.wait()
        return real(self, shard, offset, memory, kind)

    monkeypatch.setattr(FileSource, "read_into", read_into)
    monkeypatch.setattr("expert_daemon.watched_source.WAIT_S", 0.3)
    monkeypatch.setattr("expert_daemon.watched_source.CLOSE_S", 0.1)
    outcome = run_command("verify", tmp_path / "b", "--jobs", "2")
    released.set()
    assert outcome.status == 1
    wanted = rf"{re.escape(str(record.shard.path))}: bytes \d+ to \d+: no answer .* in 0\.3 s\n"
    assert re.search(wanted, outcome.err)


def test_a_truncated_shard_of_an_official_checkpoint_is_refused(source: Path):
    path = source / "model-00002-of-00003.safetensors"
    os.truncate(path, path.stat().st_size - 100)
    outcome = run_command("verify", source)
    assert outcome.status == 1
    assert path.name in outcome.err


def test_a_flipped_bit_of_a_gguf_is_named_with_its_expert(source: Path, tmp_path: Path):
    path = convert(open_checkpoint(source), tmp_path / "m.gguf")
    flags = ("--state-dir", tmp_path / "state")
    assert bad(path, "--record", *flags) == []
    piece = open_checkpoint(path).slice_map.slices(2, 3)[1]
    flip_bit(path, piece.offset)
    (fault,) = bad(path, *flags)
    assert fault["path"] == str(path)
    # An expert of the part that has the bit: small ones lie in one part together.
    assert fault["text"].startswith("layer 0 expert 0: tensor 'layers.0.ffn.experts.0.w1.weight'")
