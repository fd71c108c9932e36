"""Tests of protocol/files/slice_map.py."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.files.checkpoint import open_checkpoint
from protocol.files.model_config import parse_model_config
from protocol.files.safetensors_index import Shard, TensorEntry, dtype_bytes
from protocol.files.slice_map import (
    PIECE_ALIGN,
    PIECES,
    SLOT_ALIGN,
    ExpertLayout,
    SliceMap,
    SlotImage,
)
from protocol.files.tensor_table import expert_tensors
from tests.support.fake_checkpoint import fake_config, fake_tensors, write_fake_checkpoint
from tests.support.released_config import released_config


@given(st.lists(st.integers(0, 1 << 24), min_size=6, max_size=6).map(tuple))
def test_pieces_are_aligned_and_never_overlap(piece_bytes: tuple[int, ...]) -> None:
    image = SlotImage.of_pieces(piece_bytes)
    end = 0
    for offset, n_bytes in zip(image.piece_offsets, image.piece_bytes, strict=True):
        assert offset % PIECE_ALIGN == 0
        assert end <= offset < end + PIECE_ALIGN
        end = offset + n_bytes
    assert image.slot_bytes % SLOT_ALIGN == 0
    assert end <= image.slot_bytes < end + SLOT_ALIGN
    assert image.expert_bytes == sum(piece_bytes)


def test_a_slot_of_another_number_of_pieces_is_refused() -> None:
    with pytest.raises(ValueError, match="5 piece sizes, wanted 6"):
        SlotImage.of_pieces((1, 2, 3, 4, 5))


def test_released_slot_is_the_published_expert_and_its_padding() -> None:
    config = parse_model_config(released_config(), "released")
    shard = Shard(Path("one"), 1 << 60)
    entries: dict[str, TensorEntry] = {}
    end = 0
    for name, tensor in expert_tensors(config).items():
        n_bytes = dtype_bytes(tensor.dtype, tensor.shape)
        entries[name] = TensorEntry(name, tensor.dtype, tensor.shape, shard, end, n_bytes)
        end += n_bytes
    slice_map = SliceMap.build(config, (shard,), entries)
    assert slice_map.image.expert_bytes == 18_800_640
    assert slice_map.image.slot_bytes == 18_800_640  # a multiple of 4096 by itself
    last = slice_map.slices(39, 383)
    assert [piece.piece for piece in last] == list(PIECES)
    assert sum(piece.n_bytes for piece in last) == 18_800_640
    assert last[-1].offset + last[-1].n_bytes == end
    assert slice_map.offsets.nbytes + slice_map.shard_numbers.nbytes < 1_200_000


@pytest.mark.parametrize("single_file", [False, True])
def test_slices_point_at_the_expert_bytes(tmp_path: Path, single_file: bool) -> None:
    write_fake_checkpoint(tmp_path, single_file=single_file, n_experts=4)
    checkpoint = open_checkpoint(tmp_path)
    config = checkpoint.config
    tensors = fake_tensors(config, 0)
    suffixes = ("w1.weight", "w1.scale", "w3.weight", "w3.scale", "w2.weight", "w2.scale")
    for layer in range(config.n_layers):
        for expert in range(config.n_experts):
            slices = checkpoint.slice_map.slices(layer, expert)
            for piece, suffix in zip(slices, suffixes, strict=True):
                wanted = tensors[f"layers.{layer}.ffn.experts.{expert}.{suffix}"]
                with piece.shard.path.open("rb") as file:
                    file.seek(piece.offset)
                    assert file.read(piece.n_bytes) == wanted.data
                assert (piece.dtype, piece.shape) == (wanted.dtype, wanted.shape)


def test_slices_of_all_experts_are_disjoint(demo_dir: Path) -> None:
    checkpoint = open_checkpoint(demo_dir)
    config, slice_map = checkpoint.config, checkpoint.slice_map
    ranges = sorted(
        (piece.shard.name, piece.offset, piece.offset + piece.n_bytes)
        for layer in range(config.n_layers)
        for expert in range(config.n_experts)
        for piece in slice_map.slices(layer, expert)
    )
    assert len(ranges) == config.n_keys * 6
    for (name, _, end), (next_name, begin, _) in pairwise(ranges):
        assert name != next_name or end <= begin


@pytest.mark.parametrize("key", [(-1, 0), (0, -1), (8, 0), (0, 8)])
def test_a_key_outside_the_model_is_refused(tmp_path: Path, key: tuple[int, int]) -> None:
    slice_map = open_checkpoint(write_fake_checkpoint(tmp_path)).slice_map
    with pytest.raises(ValueError, match=f"layer {key[0]} expert {key[1]}"):
        slice_map.slices(*key)


def test_an_empty_piece_is_left_out() -> None:
    config = parse_model_config(fake_config(n_layers=1, n_experts=1, top_k=1), "fake")
    experts = expert_tensors(config)
    pieces = tuple(experts.values())
    no_scale = type(pieces[0])("F8_E8M0", (0,), "expert")
    layout = ExpertLayout.of_pieces((pieces[0], no_scale, pieces[2], no_scale, pieces[4], no_scale))
    slice_map = SliceMap(
        config,
        (layout,),
        (Shard(Path("one"), 1 << 20),),
        np.zeros((1, 1, 6), np.int32),
        np.zeros((1, 1, 6), np.int64),
    )
    assert [piece.piece for piece in slice_map.slices(0, 0)] == ["gate", "up", "down"]


def test_engram_tables_point_at_values_and_scales(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_fake_checkpoint(tmp_path))
    tensors = fake_tensors(checkpoint.config, 0)
    assert [table.layer for table in checkpoint.engram_tables] == [1, 4]
    for table in checkpoint.engram_tables:
        assert table.row_bytes == checkpoint.config.engram_row_bytes == 33
        for part, suffix in ((table.values, "weight"), (table.scales, "scale")):
            wanted = tensors[f"layers.{table.layer}.engram.embed.{suffix}"]
            with part.shard.path.open("rb") as file:
                file.seek(part.offset)
                assert file.read(part.n_bytes) == wanted.data
        assert table.n_rows * table.value_bytes == table.values.n_bytes
        assert table.n_rows * table.scale_bytes == table.scales.n_bytes
