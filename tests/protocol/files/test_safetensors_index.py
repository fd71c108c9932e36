"""Tests of protocol/files/safetensors_index.py and safetensors_header.py on damaged files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors

from protocol.errors import ShardError
from protocol.files.safetensors_header import HEADER_BYTES_MAX
from protocol.files.safetensors_index import INDEX_NAME, SINGLE_NAME, load_index, read_header
from tests.support.fake_checkpoint import (
    RawTensor,
    edit_header,
    write_fake_checkpoint,
    write_index,
    write_safetensors,
)

EXPERT = "layers.1.ffn.experts.3.w2.weight"
Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """One file: a norm, an expert's two tensors."""
    path = tmp_path / "part.safetensors"
    write_safetensors(
        path,
        {
            "norm.weight": RawTensor("BF16", (8,), bytes(16)),
            "layers.1.ffn.experts.3.w2.scale": RawTensor("F8_E8M0", (8, 1), bytes(8)),
            EXPERT: RawTensor("I8", (8, 16), bytes(128)),
        },
    )
    return path


def _refusal(path: Path) -> str:
    with pytest.raises(ShardError) as caught:
        read_header(path)
    return str(caught.value)


def _index_refusal(directory: Path) -> str:
    with pytest.raises(ShardError) as caught:
        load_index(directory)
    return str(caught.value)


def test_a_header_gives_absolute_offsets(shard: Path) -> None:
    found, entries = read_header(shard)
    assert found.n_bytes == shard.stat().st_size
    assert [entry.name for entry in entries] == [
        "norm.weight",
        "layers.1.ffn.experts.3.w2.scale",
        EXPERT,
    ]
    assert entries[-1].offset + entries[-1].n_bytes == found.n_bytes
    assert entries[1].shape == (8, 1)


def test_entries_agree_with_the_safetensors_library(demo_dir: Path) -> None:
    index = load_index(demo_dir)
    assert len(index.tensors) == 1809
    for shard in index.shards:
        with safetensors.safe_open(shard.path, "np") as library:
            names = {name for name, entry in index.tensors.items() if entry.shard == shard}
            assert set(library.keys()) == names
            for name in names:
                piece = library.get_slice(name)
                assert piece.get_shape() == list(index.tensors[name].shape)
                assert piece.get_dtype() == index.tensors[name].dtype


def test_a_single_file_without_index_is_a_model(tiny_dir: Path) -> None:
    index = load_index(tiny_dir)
    assert [shard.name for shard in index.shards] == [SINGLE_NAME]
    assert len(index.tensors) == 743


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "ends at byte 0, inside its header"),
        (b"1234567", "ends at byte 7, inside its header"),
        ((100).to_bytes(8, "little") + b"{}", "header has 100 bytes, the file has 10 in all"),
        ((2**64 - 1).to_bytes(8, "little"), f"wanted at most {HEADER_BYTES_MAX}"),
        ((2).to_bytes(8, "little") + b"[]", "does not begin with '{'"),
        ((0).to_bytes(8, "little"), "does not begin with '{'"),
        ((3).to_bytes(8, "little") + b"{x}", "header is damaged: not JSON"),
        ((2).to_bytes(8, "little") + b"{}.", "last tensor ends at byte 10, the file has 11"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    message = _refusal(path)
    assert message.startswith(f"{path}: ")
    assert words in message


def _set(name: str, field: str, value: object) -> Change:
    return lambda header: header[name].__setitem__(field, value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set(EXPERT, "data_offsets", [24, 1 << 50]), "hold 1125899906842600 bytes"),
        (_set(EXPERT, "data_offsets", [152, 24]), "wanted two ascending offsets"),
        (_set(EXPERT, "data_offsets", [-8, 120]), "wanted two ascending offsets"),
        (_set(EXPERT, "data_offsets", [24.0, 152.0]), "wanted two ascending offsets"),
        (_set(EXPERT, "data_offsets", [False, 128]), "wanted two ascending offsets"),
        (_set(EXPERT, "data_offsets", [1 << 80, 1 << 81]), "wanted two ascending offsets"),
        (_set(EXPERT, "data_offsets", [24]), "wanted two ascending offsets"),
        (_set(EXPERT, "data_offsets", [124, 252]), "ends at byte"),
        (_set(EXPERT, "data_offsets", [16, 144]), "begins at byte"),
        (_set(EXPERT, "shape", [8, 17]), "I8 [8, 17] wants 136"),
        (_set(EXPERT, "shape", [True, 128]), "wanted a list of up to 16 sizes"),
        (_set(EXPERT, "shape", [-8, -16]), "wanted a list of up to 16 sizes"),
        (_set(EXPERT, "shape", [1] * 17), "wanted a list of up to 16 sizes"),
        (_set(EXPERT, "shape", 128), "wanted a list of up to 16 sizes"),
        (_set(EXPERT, "shape", [1 << 62] * 16), "wants"),
        (_set(EXPERT, "dtype", "I9"), "its dtype is 'I9'"),
        (_set(EXPERT, "dtype", None), "its dtype is None"),
        (_set(EXPERT, "dtype", "BF16"), "BF16 [8, 16] wants 256"),
        (lambda header: header.__setitem__(EXPERT, [1]), "no JSON object of dtype"),
        (lambda header: header[EXPERT].pop("shape"), "no JSON object of dtype"),
    ],
)
def test_a_lying_header_names_file_layer_and_expert(
    shard: Path, change: Change, words: str
) -> None:
    edit_header(shard, change)
    message = _refusal(shard)
    assert message.startswith(f"{shard}: layer 1 expert 3: tensor '{EXPERT}'")
    assert words in message


def test_an_overlap_names_both_tensors(shard: Path) -> None:
    edit_header(shard, _set(EXPERT, "data_offsets", [20, 148]))
    message = _refusal(shard)
    assert f"tensor '{EXPERT}': begins at byte" in message
    assert "inside layer 1 expert 3: tensor 'layers.1.ffn.experts.3.w2.scale'" in message


def test_a_hole_is_refused_as_the_library_does(shard: Path) -> None:
    edit_header(shard, lambda header: header.pop("layers.1.ffn.experts.3.w2.scale"))
    assert "no tensor owns the bytes between" in _refusal(shard)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(shard, "np").__enter__()


def test_bytes_after_the_last_tensor_are_refused_as_the_library_does(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes() + b"\0" * 8)
    assert "the last tensor ends at byte" in _refusal(shard)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(shard, "np").__enter__()


def test_a_truncated_shard_names_a_lost_expert(shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size - 1)
    message = _refusal(shard)
    assert "layer 1 expert 3" in message
    assert "is truncated or its header lies" in message


def test_a_tensor_that_stands_twice_in_a_header_is_refused(shard: Path) -> None:
    def double(header: dict[str, Any]) -> bytes:
        text = json.dumps(header)
        return (text[:-1] + f', "norm.weight": {json.dumps(header["norm.weight"])}}}').encode()

    edit_header(shard, double)
    assert "key 'norm.weight' stands twice" in _refusal(shard)


@pytest.mark.parametrize("metadata", [[], {"format": 1}, None, "pt"])
def test_metadata_that_is_no_map_of_texts_is_refused(shard: Path, metadata: object) -> None:
    edit_header(shard, lambda header: header.__setitem__("__metadata__", metadata))
    assert "__metadata__ is not" in _refusal(shard)


def test_a_half_byte_at_the_end_is_refused(shard: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        header[EXPERT].update(dtype="F4", shape=[255])

    edit_header(shard, change)
    assert "F4 [255] ends inside a byte" in _refusal(shard)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.safetensors")
    (tmp_path / "dir.safetensors").mkdir()
    assert "is not a regular file" in _refusal(tmp_path / "fifo.safetensors")
    assert "is not a regular file" in _refusal(tmp_path / "dir.safetensors")
    assert "the shard is missing" in _refusal(tmp_path / "none.safetensors")


def test_a_directory_without_weights_is_named(tmp_path: Path) -> None:
    assert f"holds neither {INDEX_NAME} nor {SINGLE_NAME}" in _index_refusal(tmp_path)


def test_other_files_beside_an_index_are_left_alone(tmp_path: Path) -> None:
    write_fake_checkpoint(tmp_path)
    (tmp_path / "golden.safetensors").write_bytes(b"not read")
    assert len(load_index(tmp_path).shards) == 3


def _edit_index(directory: Path, change: Change) -> None:
    raw = json.loads((directory / INDEX_NAME).read_text())
    change(raw)
    (directory / INDEX_NAME).write_text(json.dumps(raw))


SHARDS = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
FIRST = "layers.0.ffn.experts.0.w1.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw["weight_map"].pop(FIRST), "in the shard, but not in model.safetensors"),
        (lambda raw: raw["weight_map"].update({FIRST: SHARDS[1]}), f"but {SHARDS[0]} holds it"),
        (
            lambda raw: raw["weight_map"].update({FIRST.replace("w1", "w4"): SHARDS[0]}),
            "but no shard holds it",
        ),
        (lambda raw: raw["weight_map"].update({FIRST: "../x.safetensors"}), "beside the index"),
        (lambda raw: raw["weight_map"].update({FIRST: "/dev/zero"}), "beside the index"),
        (lambda raw: raw["weight_map"].update({FIRST: "a\0.safetensors"}), "beside the index"),
        (lambda raw: raw["weight_map"].update({FIRST: 7}), "beside the index"),
    ],
)
def test_an_index_that_differs_from_the_shards_is_refused(
    tmp_path: Path, change: Change, words: str
) -> None:
    write_fake_checkpoint(tmp_path)
    _edit_index(tmp_path, change)
    message = _index_refusal(tmp_path)
    assert words in message
    assert "layer 0 expert 0: tensor" in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw.pop("weight_map"), "has no weight_map"),
        (lambda raw: raw.update(weight_map={}), "has no weight_map"),
        (lambda raw: raw.update(weight_map=[1]), "has no weight_map"),
        (lambda raw: raw["metadata"].update(total_size=1), "total_size is 1, the shards hold"),
        (lambda raw: raw["metadata"].update(total_size=True), "wanted a number of bytes"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, change: Change, words: str) -> None:
    write_fake_checkpoint(tmp_path)
    _edit_index(tmp_path, change)
    message = _index_refusal(tmp_path)
    assert message.startswith(str(tmp_path / INDEX_NAME))
    assert words in message


def test_an_index_without_total_size_is_accepted(tmp_path: Path) -> None:
    write_fake_checkpoint(tmp_path)
    _edit_index(tmp_path, lambda raw: raw.pop("metadata"))
    assert len(load_index(tmp_path).shards) == 3


def test_a_missing_shard_says_what_it_should_hold(tmp_path: Path) -> None:
    write_fake_checkpoint(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    message = _index_refusal(tmp_path)
    assert f"{SHARDS[1]}: the shard is missing" in message
    assert "among them layer 4 expert 0" in message


def test_a_shard_cut_inside_its_header_says_what_it_should_hold(tmp_path: Path) -> None:
    write_fake_checkpoint(tmp_path)
    os.truncate(tmp_path / SHARDS[0], 100)
    message = _index_refusal(tmp_path)
    assert f"{SHARDS[0]}: says that its header has" in message
    assert "among them layer 0 expert 0" in message


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    tensor = RawTensor("I8", (4,), bytes(4))
    write_safetensors(tmp_path / "a.safetensors", {EXPERT: tensor})
    write_safetensors(tmp_path / "b.safetensors", {EXPERT: tensor, "b": tensor})
    write_index(tmp_path, {EXPERT: "a.safetensors", "b": "b.safetensors"}, 12)
    message = _index_refusal(tmp_path)
    assert "layer 1 expert 3" in message
    assert "stands twice: in" in message
    assert "a.safetensors" in message
    assert "b.safetensors" in message


def test_no_descriptor_stays_open(demo_dir: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    load_index(demo_dir)
    with pytest.raises(ShardError):
        read_header(demo_dir)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
