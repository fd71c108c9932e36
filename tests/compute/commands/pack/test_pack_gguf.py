"""Packs of GGUF models: every type kept, the metadata kept, MXFP4 turned official without loss."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compute.frontend.token_map import token_map_of
from protocol.errors import ShardError
from protocol.files.checkpoint import Checkpoint, open_checkpoint
from protocol.files.model_config import parse_model_config
from tests.support.converted_gguf import convert
from tests.support.fake_checkpoint import fake_config, write_fake_checkpoint
from tests.support.fake_gguf import WIDE, write_fake_gguf
from tests.support.local_model import LocalModel
from tests.support.packing import flip_bit, keys, pack, run_command, slot_bytes, tree

ROOT = Path(__file__).resolve().parents[4]
EXPERTS = [
    ("Q2_K", "Q2_K", "Q3_K"),
    ("Q4_K", "Q4_K", "Q4_K"),
    ("MXFP4", "Q8_0", "Q6_K"),
    ("IQ2_XXS", "IQ2_XXS", "Q2_K"),
    ("Q5_K", "BF16", "F16"),
    ("Q8_0", "Q8_0", "Q8_0"),
]


def types(name: str, shape: tuple[int, ...]) -> str:
    if ".experts.*." in name:
        return EXPERTS[int(name.split(".")[1])][("w1", "w3", "w2").index(name.split(".")[-2])]
    if len(shape) == 1 or ".hc_" in name or name.endswith(("q_weight", "k_weight")):
        return "F32"
    return "Q6_K" if name.startswith("head") else "Q2_K" if "engram" in name else "Q8_0"


@pytest.fixture(scope="module", params=["whole", "split"])
def source(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = fake_config(n_layers=6, hidden_size=256, expert_width=256, text_config=WIDE)
    config = replace(parse_model_config(raw, "wide"), n_draft_stages=0)
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    if request.param == "whole":
        return write_fake_gguf(path, config, types=types)
    return write_fake_gguf(path, config, types=types, ds4=True, n_parts=3)


def read(entry) -> bytes:
    with entry.shard.path.open("rb") as file:
        file.seek(entry.offset)
        return file.read(entry.n_bytes)


def assert_same_model(packed: Checkpoint, whole: Checkpoint):
    assert packed.kind == "pack"
    assert packed.config == whole.config
    for key in keys(whole):
        assert slot_bytes(packed, *key) == slot_bytes(whole, *key), key
        assert len(packed.slice_map.slices(*key)) == 1
    for layer in range(whole.config.n_layers):
        assert packed.slice_map.layouts[layer] == whole.slice_map.layouts[layer]
        assert packed.expert_format(layer) == whole.expert_format(layer)
    for name, entry in whole.tensors.items():
        if ".experts." not in name:
            other = packed.tensors[name]
            assert (other.dtype, other.shape) == (entry.dtype, entry.shape)
            assert read(other) == read(entry), name
    assert [table.format for table in packed.engram_tables] == [
        table.format for table in whole.engram_tables
    ]


@pytest.mark.parametrize("flag", [(), ("--copy",), ("--interleave-engram",)])
def test_every_type_and_tensor_is_kept(source: Path, tmp_path: Path, flag: tuple[str, ...]):
    before = {path.name for path in source.parent.iterdir()}
    pack(source, tmp_path / "b", *flag)
    packed, whole = open_checkpoint(tmp_path / "b"), open_checkpoint(source)
    assert_same_model(packed, whole)
    assert token_map_of(packed).tolist() == token_map_of(whole).tolist()
    linked = {path.name for path in (tmp_path / "b").iterdir()} & before
    assert bool(linked) == (flag == ())
    assert run_command("verify", tmp_path / "b").status == 0
    for path in source.parent.iterdir():
        path.chmod(0o644)


def test_logits_are_the_same_bits(source: Path, tmp_path: Path):
    pack(source, tmp_path / "b", "--copy")
    ids = [3, 17, 40, 5, 62, 0, 9, 33]
    wanted, found = (
        model.full(model.at("highway"), ids) for model in map(LocalModel, (source, tmp_path / "b"))
    )
    assert wanted.std() > 0
    assert torch.equal(found, wanted)


def test_packing_without_conversion_never_imports_torch(source: Path, tmp_path: Path):
    code = (
        "import sys, headrace; status = headrace.main(sys.argv[1:]); "
        "print(status, sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'kernels'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "pack", str(source), str(tmp_path / "b"), "--copy"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "0 []"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An official checkpoint and the GGUF of the same values."""
    directory = tmp_path_factory.mktemp("official")
    official = write_fake_checkpoint(directory / "model", n_layers=4)
    return official, convert(open_checkpoint(official), directory / "m.gguf")


def test_mxfp4_becomes_the_official_bytes_nibble_for_nibble(converted, tmp_path: Path):
    official, gguf = converted
    pack(gguf, tmp_path / "b", "--experts", "fp4", "--copy")
    packed, wanted = open_checkpoint(tmp_path / "b"), open_checkpoint(official)
    assert packed.expert_format(0) == "FP4"
    for key in keys(wanted):
        assert slot_bytes(packed, *key) == slot_bytes(wanted, *key)
    pack(gguf, tmp_path / "c", "--copy")
    assert open_checkpoint(tmp_path / "c").expert_format(0) == "MXFP4"


def test_a_share_and_its_rest_give_the_whole(source: Path, tmp_path: Path):
    pack(source, tmp_path / "b", "--copy", "--layers", "2-3")
    with pytest.raises(ShardError, match="layers 0-1, 4-5 are missing"):
        open_checkpoint(tmp_path / "b")
    pack(source, tmp_path / "b", "--copy")
    pack(source, tmp_path / "c", "--copy")
    assert tree(tmp_path / "b") == tree(tmp_path / "c")


def test_a_pack_of_a_gguf_can_be_packed_again(source: Path, tmp_path: Path):
    pack(source, tmp_path / "b", "--copy")
    pack(tmp_path / "b", tmp_path / "c", "--copy", "--mirror", tmp_path / "m")
    assert_same_model(open_checkpoint(tmp_path / "c"), open_checkpoint(source))


def test_what_lies_beside_the_file_is_not_copied(converted, tmp_path: Path):
    official, gguf = converted
    home = tmp_path / "downloads"
    home.mkdir()
    for name in ("letters.txt", "package.json"):
        (home / name).write_text("{}")
    (home / "m.gguf").write_bytes(gguf.read_bytes())
    (home / "tokenizer.json").write_bytes((official / "tokenizer.json").read_bytes())
    pack(home / "m.gguf", tmp_path / "b")
    names = {path.name for path in (tmp_path / "b").iterdir() if path.suffix != ".pack"}
    assert names == {"dense-00001-of-00001.gguf", "m.gguf", "pack.json", "tokenizer.json"}


def test_a_damaged_dense_file_or_link_is_named(source: Path, tmp_path: Path):
    pack(source, tmp_path / "b", "--copy")
    path = tmp_path / "b" / "dense-00001-of-00001.gguf"
    flip_bit(path, path.stat().st_size - 40)
    outcome = run_command("verify", tmp_path / "b")
    assert outcome.status == 1
    assert str(path) in outcome.err
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ShardError, match="dense-00001"):
        open_checkpoint(tmp_path / "b")


def test_a_foreign_architecture_and_a_missing_tensor_are_refused(converted, tmp_path: Path):
    _, gguf = converted
    data = gguf.read_bytes()
    (tmp_path / "a.gguf").write_bytes(data.replace(b"deepseek41", b"deepseek99"))
    (tmp_path / "c.gguf").write_bytes(
        data.replace(b"blk.1.attn_kv.weight", b"blk.9.attn_kv.weight")
    )
    for name, text in (("a", "deepseek99"), ("c", "attn_kv")):
        outcome = run_command("pack", tmp_path / f"{name}.gguf", tmp_path / "b")
        assert outcome.status in {1, 2}
        assert text in outcome.err
    assert not (tmp_path / "b").exists()
