"""`headrace pack` where something is there already: what it keeps, and what `--dry-run` says."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.packing import flip_bit, pack, run_command, run_until_killed, tree

SMALL: dict[str, Any] = {"n_layers": 2, "n_experts": 3}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_fake_checkpoint(tmp_path / "src", **SMALL)


@pytest.fixture
def wanted(source: Path, tmp_path: Path) -> dict[str, str]:
    pack(source, tmp_path / "wanted")
    return tree(tmp_path / "wanted")


@pytest.fixture
def begun(source: Path, tmp_path: Path) -> Path:
    """A pack that was killed with the first layer finished."""
    target = tmp_path / "begun"
    n_calls = 40
    while not (target / "experts-00000.pack").exists():
        assert run_until_killed(["pack", str(source), str(target), "--jobs", "1"], n_calls)
        n_calls += 4
    return target


def says_the_same_dry(*arguments: str | Path) -> str:
    """The real run's refusal, which the dry run before it has to give too."""
    dry = run_command("pack", *arguments, "--dry-run")
    real = run_command("pack", *arguments)
    assert dry.status in {1, 2}
    assert (dry.status, dry.err) == (real.status, real.err)
    return real.err


def test_other_flags_are_refused_dry_too(begun: Path, source: Path, tmp_path: Path):
    assert "engram 'linked', now" in says_the_same_dry(source, begun, "--copy")
    mirror = ("--mirror", tmp_path / "m")
    assert "mirror" in says_the_same_dry(source, begun, *mirror)
    assert not (tmp_path / "m").exists()


def test_a_changed_source_is_refused_dry_too(begun: Path, source: Path, tmp_path: Path):
    pack(source, tmp_path / "b")
    os.utime(source / "tokenizer.json", (1, 1))
    assert "changed since the pack was begun" in says_the_same_dry(source, begun)
    assert "changed since it was packed" in says_the_same_dry(source, tmp_path / "b")


def test_a_running_pack_is_told_dry_too(begun: Path, source: Path):
    with (begun / ".pack" / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another headrace pack is writing here" in says_the_same_dry(source, begun)


def test_damaged_notes_are_refused(begun: Path, source: Path):
    (begun / ".pack" / "state.json").write_text("{")
    assert "state.json: is damaged" in says_the_same_dry(source, begun)


def test_something_in_the_way_of_a_link_is_refused_dry_and_before_any_work(source, tmp_path: Path):
    pack(source, tmp_path / "b", "--layers", "0")
    name = tmp_path / "b" / "model-00003-of-00003.safetensors"
    name.unlink()
    name.write_bytes(b"mine")
    before = tree(tmp_path / "b")
    assert f"{name}: is in the way" in says_the_same_dry(source, tmp_path / "b", "--layers", "1")
    assert tree(tmp_path / "b") == before


def test_a_device_that_is_not_there_is_refused_dry_and_before_any_work(tmp_path: Path):
    wide = write_fake_checkpoint(tmp_path / "w", hidden_size=256, expert_width=256, **SMALL)
    flags = ("--experts", "q8_0", "--device", "cuda:99")
    assert "--device: 'cuda:99' cannot be used" in says_the_same_dry(wide, tmp_path / "b", *flags)
    assert not (tmp_path / "b").exists()


def test_dry_beside_what_is_there(begun: Path, source: Path, tmp_path: Path):
    before = tree(begun)
    (plan,) = pack(source, begun, "--dry-run", "--json").events
    assert 0 < plan["kept_bytes"] < plan["total_bytes"]
    assert "of it are there already" in pack(source, begun, "--dry-run").out
    assert tree(begun) == before
    pack(source, begun)
    dry = pack(source, begun, "--dry-run")
    assert "is packed already" in dry.err
    assert dry.out == ""


FINISHED = ["experts-00000.pack", "config.json", "dense-00001-of-00001.safetensors"]


@pytest.mark.parametrize("name", FINISHED)
@pytest.mark.parametrize("state", ["begun", "finished"])
def test_a_finished_file_that_was_altered_is_written_again(
    begun: Path, source: Path, wanted: dict[str, str], state: str, name: str
):
    if state == "finished":
        pack(source, begun)
    path = begun / name
    flip_bit(path, 5000 if name.startswith("experts") else path.stat().st_size - 3)
    outcome = pack(source, begun)
    assert f"{path}: was changed since it was finished" in outcome.err
    assert tree(begun) == wanted


@pytest.mark.parametrize("at", [100, -5])
def test_a_damaged_header_or_index_is_found_whatever_its_time(
    begun: Path, source: Path, wanted: dict[str, str], at: int
):
    path = begun / "experts-00000.pack"
    status = path.stat()
    flip_bit(path, at % status.st_size)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert "it is written again" in pack(source, begun).err
    assert tree(begun) == wanted


def test_what_keeps_size_and_time_is_left_to_verify(begun: Path, source: Path):
    path = begun / "experts-00000.pack"
    status = path.stat()
    flip_bit(path, 5000)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    pack(source, begun)
    outcome = run_command("verify", begun)
    assert outcome.status == 1
    assert f"layer 0 expert 0: {path}" in outcome.err


def test_another_time_alone_writes_nothing_again(begun: Path, source: Path):
    path = begun / "experts-00000.pack"
    os.utime(path)
    inode = path.stat().st_ino
    assert "again" not in pack(source, begun).err
    assert path.stat().st_ino == inode


def test_a_link_that_went_is_made_again(source: Path, tmp_path: Path):
    pack(source, tmp_path / "b")
    (tmp_path / "b" / "model-00003-of-00003.safetensors").unlink()
    pack(source, tmp_path / "b")
    assert run_command("verify", tmp_path / "b").status == 0


def test_a_run_that_fails_midway_leaves_the_source_writable(tmp_path: Path):
    wide = write_fake_checkpoint(tmp_path / "w", hidden_size=256, expert_width=256, **SMALL)
    from protocol.files.checkpoint import open_checkpoint

    scale = open_checkpoint(wide).slice_map.slices(1, 2)[1]
    with scale.shard.path.open("r+b") as file:
        file.seek(scale.offset)
        file.write(b"\xff")
    modes = {path.name: path.stat().st_mode for path in wide.iterdir()}
    outcome = run_command("pack", wide, tmp_path / "b", "--experts", "q8_0", "--device", "cpu")
    assert outcome.status == 1
    assert {path.name: path.stat().st_mode for path in wide.iterdir()} == modes
