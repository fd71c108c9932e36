"""Chunks by the launchers of kernels: what torch gives, whatever the chunks' sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compute.model import source_launches
from compute.model.launched_attention import LaunchedAttention
from compute.model.model import Model
from compute.model.record import Record
from compute.model.sequence import Sequence
from compute.model.source_launches import SourceLaunches
from tests.support.local_model import LocalModel


def near(found: Tensor, wanted: Tensor, precision: str) -> None:
    assert torch.equal(found.argmax(1), wanted.argmax(1))
    limit = 1e-4 if precision == "unrounded" else 0.3 * float(wanted.std())
    assert float((found - wanted).abs().max()) < limit


@pytest.mark.parametrize("precision", ["vendor", "highway", "wide", "unrounded"])
def test_chunks_give_the_logits_of_torch(
    tiny: LocalModel, tiny_ids: list[int], precision: str
) -> None:
    sizes = [1, 2, 1, 30, len(tiny_ids) - 34]
    wanted = tiny.cut(tiny.at(precision), tiny_ids, sizes)
    near(tiny.cut(tiny.at(precision, launches=True), tiny_ids, sizes), wanted, precision)


@pytest.mark.parametrize("sizes", [[41, 15], [13] * 4 + [4], [1] * 20 + [36]])
def test_chunks_of_all_sizes_leave_the_sequence_that_one_chunk_leaves(
    tiny: LocalModel, tiny_ids: list[int], sizes: list[int]
) -> None:
    model = tiny.at("unrounded", launches=True)
    whole, cut = (model.new_sequence(len(tiny_ids)) for _ in range(2))
    wanted = tiny.cut(model, tiny_ids, [len(tiny_ids)], sequence=whole)
    found = tiny.cut(model, tiny_ids, sizes, sequence=cut)
    near(found, wanted, "unrounded")
    for one, other in zip(states(whole), states(cut), strict=True):
        assert float((one - other).abs().max()) < 1e-4


def states(sequence: Sequence) -> list[Tensor]:
    return [*sequence.windows, *sequence.rows.values(), *sequence.keys.values()]


@pytest.fixture(scope="module")
def long_ids() -> list[int]:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(11, 4096, (1400,), generator=generator).tolist()


def test_a_real_choice_of_rows_gives_the_same_without_roundings(
    demo: LocalModel, long_ids: list[int]
) -> None:
    def found(model: Model) -> tuple[Tensor, Record]:
        record = Record(full=True)
        return demo.cut(model, long_ids, [1300, 100], record), record

    wanted, by_torch = found(demo.at("unrounded"))
    launched, by_kernels = found(demo.at("unrounded", launches=True))
    share = ((launched - wanted).abs().amax(1) <= 1e-3).float().mean()
    assert float(share) > 0.99
    assert by_torch.selections.keys() == by_kernels.selections.keys()
    for layer, rows in by_torch.selections.items():
        same = (by_kernels.selections[layer] == rows).all(1).float().mean()
        assert float(same) > 0.98  # scores may tie within single precision


def test_how_many_tokens_are_scored_at_once_changes_no_bit(
    demo: LocalModel, long_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, numerics = demo.config, demo.at("highway").numerics
    layer, generator = config.index_source_layers[-1], torch.Generator().manual_seed(5)
    n_tokens, n_groups = 9, 1300
    site = demo.at("highway", launches=True).blocks[layer].attention
    assert isinstance(site, LaunchedAttention)
    sources = SourceLaunches(config, layer, site.weights, numerics, site.sources.multiply)
    x = torch.randn(n_tokens, config.hidden_size, generator=generator)
    qr = torch.randn(n_tokens, config.q_lora_rank, generator=generator)
    keys = torch.randn(n_groups, config.index_head_dim, generator=generator).bfloat16()
    kept = torch.randint(0, 2, (n_tokens, -(-n_groups // 8)), generator=generator).byte()
    positions = torch.arange(n_groups - n_tokens, n_groups)
    turns = site.rotary.table(n_groups)

    def chosen() -> Tensor:
        return sources.choose(x, qr, positions, turns, keys, kept)

    wanted = chosen()
    assert bool((wanted >= 0).all())
    for most in (2 * n_groups, 6 * n_groups):
        monkeypatch.setattr(source_launches, "MOST_SCORES", most)
        assert torch.equal(chosen(), wanted)


def test_the_vendors_defect_is_that_of_torch(tiny: LocalModel, tiny_ids: list[int]) -> None:
    sizes = [20, *[1] * (len(tiny_ids) - 20)]
    by_torch = tiny.at("unrounded", vendor_decode_defect=True)
    launched = tiny.at("unrounded", vendor_decode_defect=True, launches=True)
    near(tiny.cut(launched, tiny_ids, sizes), tiny.cut(by_torch, tiny_ids, sizes), "unrounded")
