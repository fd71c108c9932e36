"""Tests of protocol/files/checkpoint.py: a whole directory, right or wrong in one thing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.errors import ConfigError, ShardError
from protocol.files.checkpoint import open_checkpoint, resolve_model
from tests.support.fake_checkpoint import (
    RawTensor,
    blank_daemon_bytes,
    edit_config,
    edit_header,
    fake_tensors,
    write_fake_checkpoint,
    write_safetensors,
)
from tests.support.released_config import write_released_headers

Tensors = dict[str, RawTensor]
EXPERT = "layers.3.ffn.experts.5.w2.weight"


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """A fake checkpoint in one file, so that a test can replace it whole."""
    return write_fake_checkpoint(tmp_path / "fake", single_file=True)


def _with_tensors(directory: Path, change: Callable[[Tensors], object]) -> None:
    tensors = fake_tensors(open_checkpoint(directory).config, 0)
    change(tensors)
    write_safetensors(directory / "model.safetensors", tensors)


def _refusal(directory: Path) -> str:
    with pytest.raises(ShardError) as caught:
        open_checkpoint(directory)
    return str(caught.value)


def test_the_tiny_model_and_the_demo_are_opened(tiny_dir: Path, demo_dir: Path) -> None:
    tiny = open_checkpoint(tiny_dir)
    assert (len(tiny.shards), len(tiny.tensors), len(tiny.engram_tables)) == (1, 743, 2)
    demo = open_checkpoint(demo_dir)
    assert (len(demo.shards), len(demo.tensors)) == (3, 1809)
    assert demo.slice_map.image.slot_bytes == 28672
    assert len(demo.fingerprint) == 16


@pytest.mark.parametrize("n_layers", [1, 2, 3, 5, 6, 8, 11])
@pytest.mark.parametrize("n_shards", [1, 2, 5])
def test_fake_checkpoints_of_any_size_are_opened(
    tmp_path: Path, n_layers: int, n_shards: int
) -> None:
    write_fake_checkpoint(tmp_path, n_layers=n_layers, n_shards=n_shards, n_experts=4)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.n_layers == n_layers
    assert 1 <= len(checkpoint.shards) <= n_shards


def test_dense_tensors_hold_no_byte_of_the_daemon(fake: Path) -> None:
    checkpoint = open_checkpoint(fake)
    names = {entry.name for entry in checkpoint.dense_tensors()}
    assert "head.weight" in names
    assert "layers.1.engram.wkv.weight" in names
    assert not any(".experts." in name or ".engram.embed." in name for name in names)
    blank_daemon_bytes(fake)
    tensors = fake_tensors(checkpoint.config, 0)
    content = (fake / "model.safetensors").read_bytes()
    for name, entry in checkpoint.tensors.items():
        found = content[entry.offset : entry.offset + entry.n_bytes]
        is_blank = not any(found)
        assert found == tensors[name].data or (is_blank and name not in names)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(EXPERT), "is in no shard, wanted I8 [64, 16]"),
        (
            lambda t: t.update({EXPERT: RawTensor("U8", (64, 16), bytes(1024))}),
            "is U8 [64, 16], wanted I8 [64, 16]",
        ),
        (
            lambda t: t.update({EXPERT: RawTensor("I8", (32, 32), bytes(1024))}),
            "is I8 [32, 32], wanted I8 [64, 16]",
        ),
        (
            lambda t: t.update({EXPERT: RawTensor("I8", (0,), b"")}),
            "is I8 [0], wanted I8 [64, 16]",
        ),
    ],
)
def test_a_wrong_expert_tensor_names_layer_and_expert(
    fake: Path, change: Callable[[Tensors], object], words: str
) -> None:
    _with_tensors(fake, change)
    message = _refusal(fake)
    assert f"layer 3 expert 5: tensor '{EXPERT}' {words}" in message
    assert message.startswith(str(fake))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("layers.2.attn.compressor.wgate.weight", "wanted BF16 [32, 64]"),
        ("layers.5.attn.indexer.k_norm.weight", "wanted BF16 [32]"),
        ("layers.7.attn.indexer.wq_b.scale", "wanted F8_E8M0 [2, 1]"),
        ("layers.4.engram.embed.scale", "wanted F8_E8M0 [358, 1]"),
        ("norm.weight", "wanted BF16 [64]"),
    ],
)
def test_a_missing_tensor_of_any_role_is_named(fake: Path, name: str, words: str) -> None:
    _with_tensors(fake, lambda tensors: tensors.pop(name))
    assert f"tensor '{name}' is in no shard, {words}" in _refusal(fake)


@pytest.mark.parametrize(
    "name",
    [
        "layers.5.attn.compressor.wgate.weight",  # a ratio 1 source has none
        "layers.8.attn_norm.weight",
        "layers.0.ffn.experts.8.w1.weight",
        "layers.0.attn.compressor.ape",
        "model.norm.weight",
    ],
)
def test_a_tensor_that_the_model_does_not_have_is_refused(fake: Path, name: str) -> None:
    tensor = RawTensor("BF16", (1,), bytes(2))
    _with_tensors(fake, lambda tensors: tensors.update({name: tensor}))
    message = _refusal(fake)
    assert f"tensor '{name}' is no part of the model" in message


def test_skipped_tensors_may_be_there_or_not(tmp_path: Path) -> None:
    with_them = open_checkpoint(write_fake_checkpoint(tmp_path / "a"))
    without = open_checkpoint(write_fake_checkpoint(tmp_path / "b", skipped=False))
    skipped = with_them.tensors.keys() - without.tensors.keys()
    assert {"mtp.0.main_norm.weight", "vision.norm.weight", "image_start"} <= skipped
    assert "layers.0.ffn.gate.bias_vl" in skipped


def test_a_config_of_another_size_is_refused_by_the_first_tensor(fake: Path) -> None:
    edit_config(fake, lambda raw: raw["text_config"].update(vocab_size=96))
    assert "tensor 'embed.weight' is BF16 [64, 64], wanted BF16 [96, 64]" in _refusal(fake)


def test_a_truncated_shard_names_file_layer_and_expert(tmp_path: Path) -> None:
    write_fake_checkpoint(tmp_path)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    message = _refusal(tmp_path)
    assert message.startswith(f"{shard}: layer 7 expert 7")
    assert "truncated" in message


def test_config_errors_come_before_any_shard_is_looked_at(tmp_path: Path) -> None:
    write_fake_checkpoint(tmp_path)
    for shard in tmp_path.glob("*.safetensors"):
        shard.unlink()
    edit_config(tmp_path, lambda raw: raw.update(model_type="deepseek_v4"))
    with pytest.raises(ConfigError, match="DeepSeek-V4 is another architecture"):
        open_checkpoint(tmp_path)


def test_the_fingerprint_ignores_times_contents_and_place(tmp_path: Path) -> None:
    first = write_fake_checkpoint(tmp_path / "a")
    wanted = open_checkpoint(first).fingerprint
    other_seed = write_fake_checkpoint(tmp_path / "b", seed=1)
    assert open_checkpoint(other_seed).fingerprint == wanted
    os.utime(first / "config.json", (1, 1))
    edit_config(first, lambda raw: raw["text_config"].update(raw["text_config"].copy()))
    text = json.loads((first / "config.json").read_text())
    (first / "config.json").write_text(json.dumps(text, sort_keys=True))
    blank_daemon_bytes(first)
    assert open_checkpoint(first).fingerprint == wanted
    assert open_checkpoint(Path(os.path.relpath(first))).fingerprint == wanted


def _rename_a_shard(directory: Path) -> None:
    old, new = "model-00001-of-00003.safetensors", "model-0000a-of-00003.safetensors"
    (directory / old).rename(directory / new)
    index = directory / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(old, new))


def _lengthen_a_header(directory: Path) -> None:
    shard = directory / "model-00003-of-00003.safetensors"
    edit_header(shard, lambda header: header["__metadata__"].update(note="x" * 64))


@pytest.mark.parametrize(
    "change",
    [
        lambda directory: edit_config(directory, lambda raw: raw.update(eos_token_id=3)),
        lambda directory: edit_config(directory, lambda raw: raw.update(unknown_field=3)),
        _rename_a_shard,
        _lengthen_a_header,
    ],
)
def test_the_fingerprint_sees_config_names_and_offsets(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    write_fake_checkpoint(tmp_path)
    before = open_checkpoint(tmp_path).fingerprint
    change(tmp_path)
    assert open_checkpoint(tmp_path).fingerprint != before


def test_the_demo_keeps_its_fingerprint(demo_dir: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(demo_dir, tmp_path / "copy")
    fingerprint = open_checkpoint(demo_dir).fingerprint
    assert open_checkpoint(copy).fingerprint == fingerprint
    assert fingerprint.hex() == "28db5ad9c76b8cd6095d61dbcb669486"


def test_demo_is_the_package_beside_the_rooms(demo_dir: Path) -> None:
    assert resolve_model("demo") == demo_dir
    assert resolve_model(str(demo_dir)) == demo_dir
    assert resolve_model(demo_dir) == demo_dir


def test_demo_is_found_from_any_directory(tmp_path: Path, root: Path) -> None:
    (tmp_path / "demo").mkdir()
    code = "from protocol.files.checkpoint import resolve_model; print(resolve_model('demo'))"
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert Path(done.stdout.strip()) == root / "demo"


@pytest.mark.parametrize("name", ["no/such/dir", "deepseek-ai/DeepSeek-V4.1-Flash", ""])
def test_a_model_that_is_not_there_is_a_config_error(name: str) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        resolve_model(name)


def test_opening_imports_nothing_heavy(root: Path) -> None:
    code = (
        "import sys, protocol.files.checkpoint; "
        "print(sorted({m.split('.')[0] for m in sys.modules} "
        "& {'torch', 'triton', 'zmq', 'msgpack', 'tokenizers', 'rich', 'safetensors', 'uvloop'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root, capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


def test_the_released_model_opens_in_a_few_seconds(tmp_path: Path) -> None:
    try:
        write_released_headers(tmp_path)
    except OSError as error:
        pytest.skip(f"no sparse files of this size here: {error}")
    start = time.monotonic()
    checkpoint = open_checkpoint(tmp_path)
    seconds = time.monotonic() - start
    assert len(checkpoint.tensors) == 96_085
    assert sum(entry.n_bytes for entry in checkpoint.tensors.values()) == 510_286_023_000
    assert [table.n_rows for table in checkpoint.engram_tables] == [384006168, 384016682]
    assert {table.row_bytes for table in checkpoint.engram_tables} == {264}
    assert len(checkpoint.slice_map.slices(39, 383)) == 6
    print(f"released headers opened in {seconds:.2f} s")
    assert seconds < 20


def test_what_is_left_alone_is_said_in_one_line(fake: Path, demo_dir: Path) -> None:
    assert open_checkpoint(fake).notes() == (
        "tensors left alone: 1 of aligner, 1 of image, 2 of mtp, 1 of vision",
    )
    assert open_checkpoint(demo_dir).notes() == ()
