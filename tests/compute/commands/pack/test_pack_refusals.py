"""What `headrace pack` refuses before it writes anything, and how fast."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.fake_checkpoint import (
    edit_config,
    edit_header,
    fake_tensors,
    write_fake_checkpoint,
    write_safetensors,
)
from tests.support.packing import pack, run_command
from tests.support.released_config import write_released_headers


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_fake_checkpoint(tmp_path / "src", n_layers=3)


@contextmanager
def untouched(directory: Path) -> Iterator[None]:
    """Nothing is created or removed below a directory, and no second goes by."""
    before = sorted(directory.rglob("*"))
    started = time.monotonic()
    yield
    assert time.monotonic() - started < 1
    assert sorted(directory.rglob("*")) == before


def refused(tmp_path: Path, *arguments: str | Path) -> str:
    with untouched(tmp_path):
        outcome = run_command("pack", *arguments)
    assert outcome.status in {1, 2}
    assert outcome.err.count("\n") == 1
    return outcome.err


def test_a_missing_tensor(source: Path, tmp_path: Path):
    def drop(header):
        header["other"] = header.pop("layers.1.attn_norm.weight")

    edit_header(source / "model-00001-of-00003.safetensors", drop)
    assert "layers.1.attn_norm.weight" in refused(tmp_path, source, tmp_path / "b")


def test_a_duplicate_tensor(source: Path, tmp_path: Path):
    index = json.loads((source / "model.safetensors.index.json").read_text())
    from protocol.files.model_config import load_model_config

    tensor = fake_tensors(load_model_config(source), 0)["norm.weight"]
    write_safetensors(source / "extra.safetensors", {"norm.weight": tensor, "image_x": tensor})
    index["weight_map"]["image_x"] = "extra.safetensors"
    del index["metadata"]
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    err = refused(tmp_path, source, tmp_path / "b")
    assert "'norm.weight' stands twice" in err


def test_a_foreign_architecture(source: Path, tmp_path: Path):
    edit_config(source, lambda raw: raw.update(model_type="deepseek_v4"))
    assert "deepseek_v4" in refused(tmp_path, source, tmp_path / "b")


def test_a_source_that_is_not_there(tmp_path: Path):
    assert "no such directory" in refused(tmp_path, tmp_path / "nothing", tmp_path / "b")


def test_a_read_only_target(source: Path, tmp_path: Path):
    target = tmp_path / "ro"
    target.mkdir(mode=0o555)
    assert f"{target}: is read-only" in refused(tmp_path, source, target)
    assert f"{target}: is read-only" in refused(tmp_path, source, target / "deeper" / "b")
    err = refused(tmp_path, source, tmp_path / "b", "--mirror", target)
    assert f"{target}: is read-only" in err


def test_a_target_that_is_a_file(source: Path, tmp_path: Path):
    (tmp_path / "b").write_text("")
    assert "is not a directory" in refused(tmp_path, source, tmp_path / "b")


def test_no_room(source: Path, tmp_path: Path, monkeypatch):
    real = os.statvfs

    class Full:
        def __init__(self, path):
            self.f_flag, self.f_frsize, self.f_bavail = real(path).f_flag, 4096, 16000

    monkeypatch.setattr(os, "statvfs", Full)  # less than what is kept spare
    err = refused(tmp_path, source, tmp_path / "b")
    assert "no room" in err
    assert "62.5 MiB free" in err
    dry = run_command("pack", source, tmp_path / "b", "--dry-run")
    assert dry.status == 2


def test_no_room_is_found_from_the_config_alone(tmp_path: Path):
    from tests.support.released_config import released_config

    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "config.json").write_text(json.dumps(released_config()))
    free = os.statvfs(tmp_path)
    if free.f_bavail * free.f_frsize > 280e9:
        pytest.skip("there is room for the whole model here")
    assert "no room" in refused(tmp_path, tmp_path / "src", tmp_path / "b")


# Asked: under a second, as on most machines; 1.6 at 2 GHz with another test beside it.
RELEASED_CPU_S = 3.0


def seconds_to_refuse(*arguments: str | Path) -> tuple[float, str]:
    started = time.process_time()
    outcome = run_command("pack", *arguments)
    assert outcome.status in {1, 2}
    return time.process_time() - started, outcome.err


@pytest.mark.parametrize("fault", ["leave_out", "twice"])
def test_a_missing_or_duplicate_tensor_of_the_released_model(tmp_path: Path, fault: str):
    (tmp_path / "src").mkdir()
    name = "layers.39.ffn.experts.383.w2.scale"
    try:
        write_released_headers(tmp_path / "src", **{fault: name})
    except OSError as error:
        pytest.skip(f"no sparse files here: {error}")
    flags = ("--layers", "0")  # so that there is room
    seconds, err = seconds_to_refuse(tmp_path / "src", tmp_path / "b", *flags)
    assert name in err
    assert seconds < RELEASED_CPU_S


def test_a_directory_with_other_files(source: Path, tmp_path: Path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").write_text("")
    assert "holds 'thesis.tex'" in refused(tmp_path, source, tmp_path / "b")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "experts-00000-stripe-1-of-2.pack").write_text("")
    stripes = f"{tmp_path / 'x'},{tmp_path / 'y'}"
    assert "holds 'experts" in refused(tmp_path, source, tmp_path / "c", "--stripe", stripes)


def test_directories_that_are_the_same(source: Path, tmp_path: Path):
    assert "is the source itself" in refused(tmp_path, source, source)
    same = f"{tmp_path / 'x'},{tmp_path / 'x'}"
    assert "twice" in refused(tmp_path, source, tmp_path / "b", "--stripe", same)
    assert "two directories" in refused(tmp_path, source, tmp_path / "b", "--stripe", "x")
    assert "--mirror" in refused(tmp_path, source, tmp_path / "b", "--mirror", tmp_path / "b")
    assert "--mirror" in refused(tmp_path, source, tmp_path / "b", "--mirror", source / ".." / "b")


def test_a_target_inside_the_source_and_a_source_inside_the_target(source: Path, tmp_path: Path):
    (tmp_path / "link").symlink_to(source)
    for place in (source / "b", source / "deep" / "b", tmp_path / "link" / "b"):
        assert "lies inside the source" in refused(tmp_path, source, place)
        assert "lies inside the source" in refused(
            tmp_path, source, tmp_path / "b", "--mirror", place
        )
    (tmp_path / "up").symlink_to(tmp_path)
    for place in (tmp_path, tmp_path / "up"):
        assert "holds the source" in refused(tmp_path, source, place)
    stripes = f"{tmp_path / 'x'},{source / 'y'}"
    assert "lies inside the source" in refused(
        tmp_path, source, tmp_path / "b", "--stripe", stripes
    )


def test_a_target_that_holds_what_the_source_links_to(source: Path, tmp_path: Path):
    (tmp_path / "blobs").mkdir()
    shard = source / "model-00002-of-00003.safetensors"
    shard.rename(tmp_path / "blobs" / "x")
    shard.symlink_to(tmp_path / "blobs" / "x")
    err = refused(tmp_path, source, tmp_path / "blobs")
    assert "of the source links to; give a directory beside it" in err


def test_empty_values_and_empty_parts(source: Path, tmp_path: Path):
    target = tmp_path / "b"
    for flag, value, found in (
        ("--stripe", "", "''"),
        ("--stripe", "x,,y", "part 2 of 'x,,y'"),
        ("--stripe", "x,", "part 2 of 'x,'"),
        ("--layers", "", "''"),
        ("--layers", "0,,1", "part 2 of '0,,1'"),
        ("--layers", "0-", "'0-'"),
        ("--mirror", "", "''"),
    ):
        err = refused(tmp_path, source, target, flag, value)
        assert f"{flag}: {found} " in err


def test_layers_and_jobs_out_of_range(source: Path, tmp_path: Path):
    assert "--layers: 3" in refused(tmp_path, source, tmp_path / "b", "--layers", "1-3")
    assert "--layers" in refused(tmp_path, source, tmp_path / "b", "--layers", "x")
    assert "--jobs" in refused(tmp_path, source, tmp_path / "b", "--jobs", "0")


def test_rows_that_are_no_whole_blocks_are_named_by_their_tensor(tmp_path: Path, demo_dir: Path):
    err = refused(tmp_path, demo_dir, tmp_path / "b", "--experts", "q2k-q3k")
    assert "'layers.0.ffn.experts.0.w2.weight' has rows of 64 values, Q3_K wants" in err


def test_another_target_format_into_a_finished_pack(source: Path, tmp_path: Path):
    pack(source, tmp_path / "b")
    wide = write_fake_checkpoint(tmp_path / "w", n_layers=3, hidden_size=256, expert_width=256)
    err = refused(tmp_path, wide, tmp_path / "b", "--experts", "q8_0")
    assert "experts 'fp4', now wanted 'q8_0'" in err


def test_another_model_into_a_finished_pack(source: Path, tmp_path: Path):
    pack(source, tmp_path / "b")
    other = write_fake_checkpoint(tmp_path / "w", n_layers=3, seed=1)
    assert "changed since it was packed" in refused(tmp_path, other, tmp_path / "b")
