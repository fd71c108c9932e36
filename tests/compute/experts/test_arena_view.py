from __future__ import annotations

import mmap
import os
import warnings

import pytest
import torch

from compute.experts.arena_view import ExpertViews, PieceShapes
from protocol.arena.layout import ArenaLayout, ArenaView
from protocol.errors import ProtocolError

SHAPES = ((4, 16), (4, 1), (4, 16), (4, 1), (32, 2), (32, 1))
SIZES = tuple(out * row for out, row in SHAPES)
PLACES = tuple(256 * piece for piece in range(6))
LAYER = PieceShapes(PLACES, SHAPES)
SMALLER = PieceShapes((0, 64, 64, 128, 128, 192), ((4, 16), (0, 0)) * 2 + ((32, 2), (0, 0)))
LAYOUT = ArenaLayout.plan(
    n_layers=1,
    n_experts=2,
    n_slots_max=3,
    slot_bytes=4096,
    row_bytes=33,
    ring_rows=4,
    piece_offsets=PLACES,
    piece_bytes=SIZES,
)


def _mapping() -> tuple[mmap.mmap, mmap.mmap]:
    """A writable and a read-only mapping of one file in memory."""
    fd = os.memfd_create("arena")
    os.ftruncate(fd, LAYOUT.n_bytes)
    both = mmap.mmap(fd, LAYOUT.n_bytes), mmap.mmap(fd, LAYOUT.n_bytes, prot=mmap.PROT_READ)
    os.close(fd)
    return both


def test_views_show_the_slots_bytes_in_the_pieces_shapes() -> None:
    writable, read_only = _mapping()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        views = ExpertViews(ArenaView(read_only, LAYOUT), (LAYER, SMALLER))
    matrices = views.matrices(0, 2)
    assert [tuple(piece.shape) for piece in matrices] == list(SHAPES)
    assert all(piece.dtype == torch.uint8 for piece in matrices)
    start = LAYOUT.slot_offset(2) + 256 * 4
    writable[start : start + 64] = bytes(range(64))
    assert matrices.down.flatten().tolist() == list(range(64))
    assert views.matrices(0, 2) is matrices
    assert views.matrices(0, 1).down.sum() == 0


def test_pieces_of_another_size_than_the_models_are_refused() -> None:
    _, read_only = _mapping()
    shapes = ((5, 16), *SHAPES[1:])
    with pytest.raises(ProtocolError, match="piece gate has 64 bytes a slot"):
        ExpertViews(ArenaView(read_only, LAYOUT), [PieceShapes(PLACES, shapes)])


def test_a_layer_of_other_formats_has_its_own_views_of_a_slot() -> None:
    writable, read_only = _mapping()
    views = ExpertViews(ArenaView(read_only, LAYOUT), (LAYER, SMALLER))
    start = LAYOUT.slot_offset(1)
    writable[start : start + 256] = bytes(range(256))
    first = views.matrices(0, 1)
    assert first.gate_scale.numel() == 4
    second = views.matrices(1, 1)
    corners = [int(piece[0, 0]) for piece in (second.gate, second.up, second.down)]
    assert corners == [0, 64, 128]
    assert second.gate_scale.numel() == 0
    assert [tuple(piece.shape) for piece in views.matrices(0, 1)] == list(SHAPES)


@pytest.mark.gpu
def test_a_copy_on_a_gpu_is_complete_and_hides_what_comes_after() -> None:
    writable, read_only = _mapping()
    device = torch.device("cuda")
    views = ExpertViews(ArenaView(read_only, LAYOUT), (LAYER, SMALLER), device)
    start = LAYOUT.slot_offset(2) + 256 * 4
    torch.cuda._sleep(20_000_000)
    found = []
    for turn in range(20):
        writable[start : start + 64] = bytes([turn] * 64)
        found.append(views.matrices(0, 2).down)
        writable[start : start + 64] = bytes([255] * 64)
    for turn, down in enumerate(found):
        assert (down == turn).all()
