"""`headrace pack`: what a pack holds, whole, striped, mirrored, a share of it, and as a plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compute.commands.pack.command import parse_layers
from protocol.errors import ConfigError, ShardError
from protocol.files.checkpoint import Checkpoint, open_checkpoint
from protocol.files.pack_format import slot_checksum
from protocol.files.pack_manifest import read_manifest
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.packing import flip_bit, keys, pack, run_command, slot_bytes, tree

ROOT = Path(__file__).resolve().parents[4]
WIDE: dict[str, Any] = {"hidden_size": 1024, "expert_width": 512, "n_layers": 2, "n_experts": 3}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_checkpoint(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose slots are several stripe units."""
    return write_fake_checkpoint(tmp_path_factory.mktemp("wide"), **WIDE)


def assert_same_model(packed: Checkpoint, official: Checkpoint):
    assert packed.config == official.config
    assert packed.kind == "pack"
    for key in keys(official):
        assert slot_bytes(packed, *key) == slot_bytes(official, *key), key
    for entry in official.dense_tensors():
        other = packed.tensors[entry.name]
        assert (other.dtype, other.shape) == (entry.dtype, entry.shape)
        assert read(other) == read(entry)


def read(entry) -> bytes:
    with entry.shard.path.open("rb") as file:
        file.seek(entry.offset)
        return file.read(entry.n_bytes)


def table_rows(checkpoint: Checkpoint, table) -> bytes:
    rows = bytearray()
    values, scales = read_range(table.values), read_range(table.scales)
    for row in range(table.n_rows):
        rows += values[row * table.value_bytes : (row + 1) * table.value_bytes]
        rows += scales[row * table.scale_bytes : (row + 1) * table.scale_bytes]
    return bytes(rows)


def read_range(place) -> bytes:
    with place.shard.path.open("rb") as file:
        file.seek(place.offset)
        return file.read(place.n_bytes)


@pytest.mark.parametrize("single_file", [False, True])
def test_every_expert_and_tensor_has_the_same_bytes(tmp_path: Path, single_file: bool):
    official = write_fake_checkpoint(tmp_path / "a", single_file=single_file)
    pack(official, tmp_path / "b")
    assert_same_model(open_checkpoint(tmp_path / "b"), open_checkpoint(official))


def test_demo_packs_without_loss(tmp_path: Path, demo_dir: Path):
    pack(demo_dir, tmp_path / "b", "--copy")
    assert_same_model(open_checkpoint(tmp_path / "b"), open_checkpoint(demo_dir))


def test_a_key_is_one_aligned_run_of_a_whole_slot(source: Path, tmp_path: Path):
    pack(source, tmp_path)
    slice_map = open_checkpoint(tmp_path).slice_map
    offsets = set()
    for key in keys(open_checkpoint(tmp_path)):
        (record,) = slice_map.slices(*key)
        assert (record.slot_offset, record.n_bytes) == (0, slice_map.image.slot_bytes)
        assert record.offset % 4096 == 0 == record.n_bytes % 4096
        offsets.add((record.shard.name, record.offset))
    assert len(offsets) == 64


def test_checksums_are_those_of_the_filled_slots(source: Path, tmp_path: Path):
    import numpy as np

    pack(source, tmp_path)
    packed = open_checkpoint(tmp_path)
    assert packed.checksums is not None
    for layer, expert in keys(packed):
        slot = np.frombuffer(slot_bytes(packed, layer, expert), np.uint8)
        image = packed.slice_map.layouts[layer].image
        assert packed.checksums[layer, expert] == slot_checksum(image, slot)
    assert packed.expert_format(0) == "FP4"


def test_skipped_tensors_are_kept_in_the_dense_files(source: Path, tmp_path: Path):
    pack(source, tmp_path)
    official, packed = open_checkpoint(source), open_checkpoint(tmp_path)
    names = [name for name in official.tensors if name.startswith(("mtp.", "vision.", "image_"))]
    assert names
    for name in names:
        assert read(packed.tensors[name]) == read(official.tensors[name])
        assert packed.tensors[name].shard.name.startswith("dense-")


def test_dense_files_are_of_the_format_that_the_library_reads(source: Path, tmp_path: Path):
    from safetensors import safe_open

    pack(source, tmp_path)
    with safe_open(tmp_path / "dense-00001-of-00001.safetensors", "np") as file:
        assert "embed.weight" in file.keys()  # noqa: SIM118
    for entry in open_checkpoint(tmp_path).dense_tensors():
        assert entry.offset % {"F32": 4, "BF16": 2}.get(entry.dtype, 1) == 0


def test_packing_twice_gives_the_same_files(source: Path, tmp_path: Path):
    pack(source, tmp_path / "a", "--jobs", "1")
    pack(source, tmp_path / "b", "--jobs", "7")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    again = pack(source, tmp_path / "a", "--json")
    assert again.events[-1]["event"] == "done"
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_engram_shards_are_hard_links_that_nobody_may_write(tmp_path: Path):
    official = write_fake_checkpoint(tmp_path / "a")
    before = tree(official)
    outcome = pack(official, tmp_path / "b")
    shard = "model-00003-of-00003.safetensors"
    assert (tmp_path / "b" / shard).samefile(official / shard)
    assert (tmp_path / "b" / shard).stat().st_mode & 0o222 == 0
    assert "hard link" in outcome.err
    assert tree(official) == before
    for path in (tmp_path / "b").iterdir():  # everything else is a file of its own
        if path.name != shard:
            assert path.stat().st_nlink == 1
            assert not path.is_symlink()


def test_engram_shards_of_another_file_system_are_symbolic_links(tmp_path, monkeypatch):
    official = write_fake_checkpoint(tmp_path / "a")
    real = tmp_path / "blobs"
    real.mkdir()
    for shard in official.glob("*.safetensors"):  # as a download cache lays files out
        shard.rename(real / shard.name)
        shard.symlink_to(real / shard.name)
    monkeypatch.setattr(Path, "hardlink_to", refuse_link)
    pack(official, tmp_path / "b")
    link = tmp_path / "b" / "model-00003-of-00003.safetensors"
    assert link.readlink() == real / link.name
    assert link.stat().st_mode & 0o222 == 0
    assert_same_model(open_checkpoint(tmp_path / "b"), open_checkpoint(official))


def refuse_link(*_):
    raise OSError(18, "Invalid cross-device link")


def test_a_link_that_stays_writable_is_refused(tmp_path, monkeypatch):
    official = write_fake_checkpoint(tmp_path / "a")
    monkeypatch.setattr(Path, "chmod", refuse_link)
    outcome = run_command("pack", official, tmp_path / "b")
    assert outcome.status == 2
    assert "use --copy" in outcome.err


@pytest.mark.parametrize("flag", ["--copy", "--interleave-engram"])
def test_engram_tables_of_their_own(source: Path, tmp_path: Path, flag: str):
    pack(source, tmp_path, flag)
    official, packed = open_checkpoint(source), open_checkpoint(tmp_path)
    assert_same_model(packed, official)
    for ours, theirs in zip(packed.engram_tables, official.engram_tables, strict=True):
        assert table_rows(packed, ours) == table_rows(official, theirs)
        assert ours.row_bytes == theirs.row_bytes
        assert (ours.scale_bytes == 0) == (flag == "--interleave-engram")
        assert ours.values.shard.name.startswith("engram-")
    assert not list(tmp_path.glob("model-*"))


def test_stripes_hold_every_second_unit(wide: Path, tmp_path: Path):
    drives = [tmp_path / "x", tmp_path / "y"]
    pack(wide, tmp_path / "b", "--stripe", f"{drives[0]},{drives[1]}")
    packed, official = open_checkpoint(tmp_path / "b"), open_checkpoint(wide)
    assert_same_model(packed, official)
    slices = packed.slice_map.slices(1, 2)
    assert len(slices) == -(-packed.slice_map.image.slot_bytes // (256 << 10)) > 3
    for part in slices:
        unit = part.slot_offset // (256 << 10)
        assert part.shard.path.parent == drives[unit % 2]
        assert part.offset % 4096 == 0 == part.slot_offset % (256 << 10)
    assert not list((tmp_path / "b").glob("experts-*"))


def test_a_missing_stripe_is_named(wide: Path, tmp_path: Path):
    pack(wide, tmp_path / "b", "--stripe", f"{tmp_path / 'x'},{tmp_path / 'y'}")
    (tmp_path / "y" / "experts-00001-stripe-2-of-2.pack").unlink()
    with pytest.raises(ShardError, match=r"y/experts-00001.*layer 1, stripe 2 of 2 is missing"):
        open_checkpoint(tmp_path / "b")
    pack(wide, tmp_path / "b", "--stripe", f"{tmp_path / 'x'},{tmp_path / 'y'}")
    assert_same_model(open_checkpoint(tmp_path / "b"), open_checkpoint(wide))


def test_stripes_inside_the_pack_move_with_it(wide: Path, tmp_path: Path):
    home = tmp_path / "b"
    pack(wide, home, "--stripe", f"{home / 'x'},{home / 'y'}", "--copy")
    home.rename(tmp_path / "moved")
    assert_same_model(open_checkpoint(tmp_path / "moved"), open_checkpoint(wide))


def test_a_drive_that_moved_is_mended_in_places_alone(wide: Path, tmp_path: Path):
    pack(wide, tmp_path / "b", "--stripe", f"{tmp_path / 'x'},{tmp_path / 'y'}")
    (tmp_path / "y").rename(tmp_path / "z")
    with pytest.raises(ShardError, match="is missing"):
        open_checkpoint(tmp_path / "b")
    path = tmp_path / "b" / "pack.json"
    path.write_text(path.read_text().replace(str(tmp_path / "y"), str(tmp_path / "z")))
    assert_same_model(open_checkpoint(tmp_path / "b"), open_checkpoint(wide))


def test_a_mirror_holds_the_same_records(wide: Path, tmp_path: Path):
    flags = ("--stripe", f"{tmp_path / 'x'},{tmp_path / 'y'}", "--mirror", tmp_path / "m")
    pack(wide, tmp_path / "b", *flags)
    packed = open_checkpoint(tmp_path / "b")
    for key in keys(packed):
        assert slot_bytes(packed, *key, mirror=True) == slot_bytes(packed, *key)
        (record,) = packed.slice_map.mirror_slices(*key)
        assert record.shard in packed.shards
        assert record.shard.path.parent == tmp_path / "m"
    assert packed.warnings == ()


def test_a_pack_opens_without_its_mirror_and_says_so(source: Path, tmp_path: Path):
    pack(source, tmp_path / "b", "--mirror", tmp_path / "m")
    flip_bit(tmp_path / "m" / "experts-00002.pack", 300)
    (tmp_path / "m" / "experts-00005.pack").unlink()
    packed = open_checkpoint(tmp_path / "b")
    assert packed.slice_map.mirror_slices(2, 0) == packed.slice_map.mirror_slices(5, 0) == ()
    assert packed.slice_map.mirror_slices(3, 0)
    first, second = packed.warnings
    assert "layer 2" in first
    assert "layer 5 of the mirror is missing" in second


def test_a_share_is_refused_by_its_missing_layers_until_it_is_whole(source: Path, tmp_path: Path):
    outcome = pack(source, tmp_path / "b", "--layers", "1-3", "--json")
    assert outcome.events[-1]["missing_layers"] == [0, 4, 5, 6, 7]
    with pytest.raises(ShardError, match="layers 0, 4-7 are missing"):
        open_checkpoint(tmp_path / "b")
    share = open_checkpoint(tmp_path / "b", incomplete=True)
    assert slot_bytes(share, 2, 5) == slot_bytes(open_checkpoint(source), 2, 5)
    with pytest.raises(ValueError, match="not in this share"):
        share.slice_map.slices(0, 0)
    pack(source, tmp_path / "b", "--layers", "0,4-7")
    assert_same_model(open_checkpoint(tmp_path / "b"), open_checkpoint(source))
    pack(source, tmp_path / "c")
    assert tree(tmp_path / "b") == tree(tmp_path / "c")


def test_the_manifest_has_a_hash_of_every_file_written(source: Path, tmp_path: Path):
    pack(source, tmp_path, "--copy")
    manifest = read_manifest(tmp_path)
    named = {file.name for file in manifest.files}
    assert named == {path.name for path in tmp_path.iterdir()} - {"pack.json"}
    assert all(len(file.hash) == 32 for file in manifest.files)


def test_a_dry_run_prints_the_plan_and_writes_nothing(source: Path, tmp_path: Path):
    target = tmp_path / "b"
    outcome = pack(source, target, "--dry-run", "--mirror", tmp_path / "m")
    assert "hard link" in outcome.out
    assert "8 files" in outcome.out
    assert list(tmp_path.iterdir()) == []
    (plan,) = pack(source, target, "--dry-run", "--json").events
    pack(source, target)
    sizes = {file["path"]: file["bytes"] for file in plan["files"]}
    assert sizes == {
        str(path): path.stat().st_size
        for path in target.iterdir()
        if path.name not in {"pack.json", "model-00003-of-00003.safetensors"}
    }


def test_json_ends_with_what_was_written(source: Path, tmp_path: Path):
    events = pack(source, tmp_path, "--json").events
    assert [event["event"] for event in events if event["event"] != "progress"] == [
        "begin", "link", "done",
    ]  # fmt: skip
    assert events[-1]["complete"] is True
    assert events[-1]["bytes"] == next(e for e in events if e["event"] == "begin")["total_bytes"]


def test_a_pack_can_be_packed_again(source: Path, tmp_path: Path):
    pack(source, tmp_path / "b")
    pack(tmp_path / "b", tmp_path / "c", "--copy", "--mirror", tmp_path / "m")
    assert_same_model(open_checkpoint(tmp_path / "c"), open_checkpoint(source))


def test_the_fingerprint_is_of_the_content_and_not_of_the_place(source: Path, tmp_path: Path):
    pack(source, tmp_path / "b")
    wanted = open_checkpoint(tmp_path / "b").fingerprint
    (tmp_path / "b").rename(tmp_path / "c")
    assert open_checkpoint(tmp_path / "c").fingerprint == wanted
    other = write_fake_checkpoint(tmp_path / "other", seed=1)
    pack(other, tmp_path / "d")
    assert open_checkpoint(tmp_path / "d").fingerprint != wanted


def test_a_record_file_of_another_pack_of_the_same_shape_is_refused(source, tmp_path: Path):
    pack(source, tmp_path / "b")
    pack(write_fake_checkpoint(tmp_path / "other", seed=1), tmp_path / "c")
    name = "experts-00004.pack"
    (tmp_path / "c" / name).replace(tmp_path / "b" / name)
    with pytest.raises(ShardError, match=r"experts-00004.*another pack"):
        open_checkpoint(tmp_path / "b")


def test_packing_fp4_never_imports_torch_nor_rich(source: Path, tmp_path: Path):
    code = (
        "import sys, headrace; status = headrace.main(sys.argv[1:]); "
        "print(status, sorted({m.split('.')[0] for m in sys.modules} "
        "& {'torch', 'kernels', 'rich', 'zmq', 'uvloop'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "pack", source, tmp_path / "b"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "0 []"


def test_manifest_and_header_say_the_source(source: Path, tmp_path: Path):
    pack(source, tmp_path)
    raw = json.loads((tmp_path / "pack.json").read_text())
    assert bytes.fromhex(raw["fingerprint"]) == open_checkpoint(source).fingerprint
    assert {row["name"] for row in raw["source"]} >= {"config.json", "tokenizer.json"}
    page = (tmp_path / "experts-00000.pack").read_bytes()[:64]
    assert bytes.fromhex(raw["fingerprint"]) in page


def test_layers_as_people_write_them():
    assert parse_layers("3") == (3,)
    assert parse_layers("0-2") == (0, 1, 2)
    assert parse_layers("7,0-2,1") == (0, 1, 2, 7)
    for text in ("", "a", "3-1", "-1", "1-", "9999"):
        with pytest.raises(ConfigError, match="--layers"):
            parse_layers(text)
