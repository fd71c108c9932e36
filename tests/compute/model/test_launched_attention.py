"""Attention of a chunk by the kernel's launcher: what the tiles of torch give."""

from __future__ import annotations

import pytest
import torch

from compute.model import attention
from compute.model.attention import Attention
from compute.model.indexer import Indexer
from tests.support.local_model import LocalModel


def launch_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attention, "_launches", lambda _site, _q: True)
    monkeypatch.setattr(Indexer, "_launches", lambda _site, _keys: True)


@pytest.mark.parametrize("precision", ["vendor", "highway", "wide"])
@pytest.mark.parametrize("most", [7, 1024])
def test_chunks_give_the_logits_of_torchs_tiles(
    tiny: LocalModel,
    tiny_ids: list[int],
    precision: str,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny.at(precision)
    sizes = [1, 2, 1, 30, len(tiny_ids) - 34]
    wanted = tiny.cut(model, tiny_ids, sizes)
    monkeypatch.setattr(attention, "MOST_QUERIES", most)
    launch_all(monkeypatch)
    found = tiny.cut(model, tiny_ids, sizes)
    assert torch.equal(found.argmax(1), wanted.argmax(1))
    assert (found - wanted).abs().max() < 0.3 * wanted.std()


def test_a_real_choice_of_rows_gives_the_same_without_roundings(
    demo: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.randint(11, 4096, (1400,), generator=torch.Generator().manual_seed(2)).tolist()
    model = demo.at("unrounded")
    wanted = demo.cut(model, ids, [1300, 100])
    launch_all(monkeypatch)
    found = demo.cut(model, ids, [1300, 100])
    near = (found - wanted).abs().amax(1) <= 1e-3
    assert float(near.float().mean()) > 0.99
