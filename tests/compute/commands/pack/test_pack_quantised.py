"""Packs in K-quants: the same blocks that `kernels.formats` makes of the official weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.formats import FORMATS, QUANTISERS, fp4
from protocol.files.checkpoint import Checkpoint, open_checkpoint
from protocol.files.slice_map import PIECES
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.packing import flip_bit, keys, pack, run_command, slot_bytes, tree

TARGETS = {
    "q2k-q3k": ("Q2_K", "Q2_K", "Q3_K"),
    "q4k": ("Q4_K", "Q4_K", "Q4_K"),
    "q8_0": ("Q8_0", "Q8_0", "Q8_0"),
}
NAMES = {"q2k-q3k": "Q2_K/Q3_K", "q4k": "Q4_K", "q8_0": "Q8_0"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_checkpoint(
        tmp_path_factory.mktemp("wide"), n_layers=2, n_experts=2, hidden_size=512, expert_width=256
    )


def piece(checkpoint: Checkpoint, key: tuple[int, int], name: str) -> torch.Tensor:
    """One piece of an expert as u8 [rows, bytes]."""
    layout = checkpoint.slice_map.layouts[key[0]]
    number = PIECES.index(name)
    offset, n_bytes = layout.image.piece_offsets[number], layout.image.piece_bytes[number]
    data = slot_bytes(checkpoint, *key)[offset : offset + n_bytes]
    rows = layout.pieces[number].shape[0]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(rows, -1)


@pytest.mark.parametrize("target", TARGETS)
def test_blocks_are_those_of_the_official_values(source: Path, tmp_path: Path, target: str):
    pack(source, tmp_path / "b", "--experts", target)
    official, packed = open_checkpoint(source), open_checkpoint(tmp_path / "b")
    for layer in range(2):
        assert packed.expert_format(layer) == NAMES[target]
        assert packed.slice_map.layouts[layer].formats == TARGETS[target]
    for key in keys(packed):
        for name, block in zip(("gate", "up", "down"), TARGETS[target], strict=True):
            values = fp4.dequantise(
                piece(official, key, name), piece(official, key, f"{name}_scale")
            )
            blocks = piece(packed, key, name)
            assert torch.equal(blocks, QUANTISERS[block](values)), (key, name)
            error = (FORMATS[block].dequantise(blocks) - values).square().mean()
            assert error < 0.1 * values.square().mean()
    assert {n for n, size in enumerate(packed.slice_map.image.piece_bytes) if size} == {0, 2, 4}


def test_dense_tensors_stay_as_they_are_whatever_the_target(source: Path, tmp_path: Path):
    pack(source, tmp_path / "b", "--experts", "q4k")
    official, packed = open_checkpoint(source), open_checkpoint(tmp_path / "b")
    for entry in official.dense_tensors():
        other = packed.tensors[entry.name]
        assert (other.dtype, other.shape, other.n_bytes) == (
            entry.dtype,
            entry.shape,
            entry.n_bytes,
        )


def test_a_record_that_was_damaged_meanwhile_is_quantised_again(source: Path, tmp_path: Path):
    pack(source, tmp_path / "wanted", "--experts", "q8_0", "--copy")
    wanted = tree(tmp_path / "wanted")
    pack(source, tmp_path / "b", "--experts", "q8_0", "--copy", "--layers", "0")
    pack(source, tmp_path / "b", "--experts", "q8_0", "--copy", "--jobs", "1")
    assert tree(tmp_path / "b") == wanted


def test_a_scale_that_is_no_number_is_named_by_its_expert(source: Path, tmp_path: Path):
    spoilt = write_fake_checkpoint(
        tmp_path / "src", n_layers=1, n_experts=2, hidden_size=256, expert_width=256
    )
    scale = open_checkpoint(spoilt).slice_map.slices(0, 1)[3]
    with scale.shard.path.open("r+b") as file:
        file.seek(scale.offset + 9)
        file.write(b"\xff")
    outcome = run_command("pack", spoilt, tmp_path / "b", "--experts", "q8_0")
    assert outcome.status == 1
    assert "layer 0 expert 1: tensor 'layers.0.ffn.experts.1.w3.scale': row 1, " in outcome.err
    flip_bit(scale.shard.path, scale.offset + 9)


def test_a_quantised_pack_can_be_quantised_again(source: Path, tmp_path: Path):
    pack(source, tmp_path / "b", "--experts", "q8_0")
    pack(tmp_path / "b", tmp_path / "c", "--experts", "q4k")
    first, second = open_checkpoint(tmp_path / "b"), open_checkpoint(tmp_path / "c")
    values = FORMATS["Q8_0"].dequantise(piece(first, (1, 1), "down"))
    assert torch.equal(piece(second, (1, 1), "down"), QUANTISERS["Q4_K"](values))


def test_a_device_that_is_not_there_is_refused(source: Path, tmp_path: Path):
    outcome = run_command("pack", source, tmp_path / "b", "--experts", "q4k", "--device", "cuda:99")
    assert outcome.status == 2
    assert "--device: 'cuda:99' cannot be used" in outcome.err
