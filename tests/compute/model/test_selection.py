"""Tiles of queries and the rows that they read."""

import torch

from compute.model import selection
from compute.model.selection import cut_tiles, select_all, select_listed


def numbers(tile):
    return tile.take(torch.arange(10)).tolist()


def test_tiles_cover_the_chunk_and_shrink_with_the_context():
    assert cut_tiles(1100, 1000) == [(0, 512), (512, 1024), (1024, 1100)]
    assert cut_tiles(40, 1 << 30) == [(0, 16), (16, 32), (32, 40)]
    assert cut_tiles(100, 1 << 21)[0] == (0, 32)


def test_a_single_query_reads_its_own_rows_without_a_mask():
    chosen = select_listed([(0, 1)], torch.tensor([[2, 5, -1]]), 9)
    assert numbers(chosen.tiles[0]) == [2, 5]
    assert chosen.tiles[0].visible is None
    every = select_all([(0, 1)], torch.tensor([3]), [3])
    assert numbers(every.tiles[0]) == [0, 1, 2]


def test_a_tile_reads_the_union_and_masks_each_query():
    indices = torch.tensor([[1, 4, -1], [0, 4, 6], [2, -1, -1]])
    chosen = select_listed([(0, 2), (2, 3)], indices, 7)
    first, second = chosen.tiles
    assert numbers(first) == [0, 1, 4, 6]
    assert first.visible is not None
    assert first.visible.int().tolist() == [[0, 1, 1, 0], [1, 0, 1, 1]]
    assert numbers(second) == [2]
    assert chosen.listed(torch.tensor([7, 7, 7]), 4)[0].tolist() == [1, 4, -1, -1]


def test_small_tiles_give_the_bits_of_one_large_tile(tiny, tiny_ids, monkeypatch):
    model = tiny.at("unrounded")
    whole = tiny.full(model, tiny_ids)
    monkeypatch.setattr(selection, "_MOST_QUERIES", 16)
    assert torch.equal(tiny.full(model, tiny_ids), whole)
