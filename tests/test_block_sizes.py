from __future__ import annotations

from kernels.formats import fp4, fp8
from kernels.reference import round_fp4_index, round_fp4_latent, round_fp8
from protocol.files import block_sizes


def test_fp8_tile_is_the_same_on_both_sides():
    assert fp8.TILE == block_sizes.TILE


def test_fp4_group_and_packing_are_the_same_on_both_sides():
    assert fp4.GROUP == block_sizes.TILE
    assert fp4.PER_BYTE == block_sizes.FP4_PER_BYTE


def test_activation_groups_are_the_same_on_both_sides():
    assert round_fp8.GROUP == block_sizes.TILE
    assert round_fp4_index.GROUP == block_sizes.TILE
    assert round_fp4_latent.GROUP == block_sizes.LATENT_GROUP
