"""Scale byte 255 is no number: `headrace pack` refuses it wherever it stands, and says where."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compute.commands.pack.scale_bytes import Scales
from protocol.errors import ShardError
from protocol.files.checkpoint import open_checkpoint
from tests.support.converted_gguf import convert
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.packing import pack, run_command


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_fake_checkpoint(
        tmp_path / "src", n_layers=2, n_experts=3, hidden_size=256, expert_width=128
    )


def spoil(path: Path, offset: int, value: int = 255) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes([value]))


def test_an_expert_is_named_by_tensor_row_and_block(source: Path, tmp_path: Path):
    down = open_checkpoint(source).slice_map.slices(1, 2)[5]  # [256, 4]
    spoil(down.shard.path, down.offset + 4 * 77 + 3)
    outcome = run_command("pack", source, tmp_path / "b")
    assert outcome.status == 1
    assert outcome.err == (
        "headrace: layer 1 expert 2: tensor 'layers.1.ffn.experts.2.w2.scale': row 77, block 3: "
        "scale byte 255 is not a number\n"
    )
    spoil(down.shard.path, down.offset + 4 * 77 + 3, 120)
    pack(source, tmp_path / "c")


@pytest.mark.parametrize("value", [0, 1, 110, 254])
def test_other_scales_pass(source: Path, tmp_path: Path, value: int):
    gate = open_checkpoint(source).slice_map.slices(0, 0)[1]
    spoil(gate.shard.path, gate.offset, value)
    pack(source, tmp_path / "b")
    (record,) = open_checkpoint(tmp_path / "b").slice_map.slices(0, 0)
    image = open_checkpoint(source).slice_map.image
    with record.shard.path.open("rb") as file:
        file.seek(record.offset + image.piece_offsets[1])
        assert file.read(1)[0] == value


@pytest.mark.parametrize("flag", ["--copy", "--interleave-engram"])
def test_a_copied_engram_table(source: Path, tmp_path: Path, flag: str):
    table = open_checkpoint(source).engram_tables[0]
    spoil(table.scales.shard.path, table.scales.offset + 5 * table.scale_bytes)
    outcome = run_command("pack", source, tmp_path / "b", flag)
    assert f"tensor 'layers.{table.layer}.engram.embed.scale': row 5, block 0" in outcome.err


def test_a_dense_tensor(source: Path, tmp_path: Path):
    entry = open_checkpoint(source).tensors["layers.1.ffn.shared_experts.w1.scale"]
    spoil(entry.shard.path, entry.offset + entry.shape[1] + 2)
    outcome = run_command("pack", source, tmp_path / "b")
    assert "'layers.1.ffn.shared_experts.w1.scale': row 1, block 2" in outcome.err


@pytest.mark.parametrize("experts", ["source", "fp4"])
def test_a_block_of_a_gguf(source: Path, tmp_path: Path, experts: str):
    path = convert(open_checkpoint(source), tmp_path / "m.gguf")
    up = open_checkpoint(path).slice_map.slices(0, 1)[1]
    assert up.dtype == "MXFP4"
    spoil(path, up.offset + 17 * (256 // 32 * 9 + 6))
    flags = [] if experts == "source" else ["--experts", experts, "--device", "cpu"]
    outcome = run_command("pack", path, tmp_path / "b", *flags)
    assert "layer 0 expert 1: tensor 'layers.0.ffn.experts.1.w3.weight': row 9, block 6" in (
        outcome.err
    )


@pytest.mark.parametrize(("step", "start"), [(1, 0), (1, 7), (17, 0), (17, 5), (17, 40)])
def test_any_cut_of_a_tensor_finds_it_at_the_same_place(step: int, start: int):
    data = np.zeros(17 * 24, np.uint8)
    row_scales = 4 if step == 17 else 17
    data[17 * 14] = 255
    scales = Scales("x", step, row_scales)
    row, block = divmod(14 if step == 17 else 17 * 14, row_scales)
    with pytest.raises(ShardError, match=f"row {row}, block {block}: "):
        scales.check(data[start:], start)
    if step == 17:
        data[:] = 255
        data[::17] = 254
        scales.check(data[start:], start)
