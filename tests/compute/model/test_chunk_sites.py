"""Sites of a chunk on a GPU: by kernels what torch gives there, alone what a chunk gives."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from compute.frontend.token_map import token_map_of
from compute.model import source_launches
from compute.model.attention import Attention
from compute.model.highway import Row
from compute.model.launched_attention import LaunchedAttention
from compute.model.model import Model
from compute.model.precision import Precision
from compute.model.routed_chunk import ChunkPlan
from compute.model.source_launches import SourceLaunches
from compute.model.step import Step
from compute.model.weights import ModelWeights, load_weights
from tests.support.decode_rig import demo

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
CONTEXT = 2600
SIZES = [[1, 2, 8, 9, 33], [7, 600, 1, 1300, 41], [2048]]


@cache
def weights() -> ModelWeights:
    return load_weights(demo(), CUDA)


@cache
def model_of(precision: str, *, launches: bool) -> Model:
    checkpoint = demo()
    return Model(
        checkpoint.config, weights(), token_map_of(checkpoint), Precision(precision), CUDA,
        launches=launches,
    )  # fmt: skip


def row_of(model: Model, n_tokens: int, layer: int) -> Row:
    """A site's input, the same at each precision but for its roundings."""
    generator = torch.Generator().manual_seed(n_tokens * 10 + layer)
    x = torch.randn(n_tokens, model.config.hidden_size, generator=generator)
    n = model.numerics
    x = x.to(CUDA, n.activation)
    return Row(x, n.round_input(x).to(n.activation) if n.rounds else x)


def apart(found: Tensor, wanted: Tensor) -> Tensor:
    """How far each row is from the one wanted, of its size."""
    found, wanted = found.float(), wanted.float()
    return (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-20)


class Both:
    """Steps of two sequences, one by kernels and one by torch."""

    def __init__(self, precision: str) -> None:
        self.models = [model_of(precision, launches=launches) for launches in (True, False)]
        self.sequences = [model.new_sequence(CONTEXT) for model in self.models]
        self.steps: list[Step] = []

    def begin(self, n_tokens: int) -> None:
        self.steps = [Step(each, n_tokens, None, None) for each in self.sequences]  # type: ignore[arg-type]

    def attend(self, layer: int, row: Row) -> list[Tensor]:
        found = []
        for model, step in zip(self.models, self.steps, strict=True):
            site = model.blocks[layer].attention
            assert type(site) is (LaunchedAttention if model is self.models[0] else Attention)
            found.append(site(step, row))
        return found

    def chosen(self, layer: int) -> tuple[Tensor, Tensor]:
        config, (launched, by_torch) = self.models[0].config, self.steps
        assert launched.chosen is not None
        assert by_torch.selection is not None
        visible = by_torch.visible_groups(config.ratio(layer))
        return launched.chosen, by_torch.selection.listed(visible, config.index_top_k)

    def end(self) -> None:
        for sequence, step in zip(self.sequences, self.steps, strict=True):
            sequence.position = step.end


def shared_share(found: Tensor, wanted: Tensor) -> float:
    """Return the share of the rows chosen by the one that the other chose as well."""
    n_rows = CONTEXT + 1  # the last stands for none

    def marks(rows: Tensor) -> Tensor:
        seen = torch.zeros(len(rows), n_rows, device=rows.device)
        return seen.scatter_(1, rows.long() % n_rows, 1.0)[:, :-1]

    one, other = marks(found), marks(wanted)
    assert torch.equal(one.sum(1), other.sum(1))
    return float((one * other).sum() / other.sum()) if bool(other.any()) else 1.0


@pytest.mark.parametrize("precision", ["vendor", "highway", "wide", "unrounded"])
@pytest.mark.parametrize("sizes", SIZES)
@torch.inference_mode()
def test_attention_and_its_choice_are_those_of_torch(precision: str, sizes: list[int]) -> None:
    both = Both(precision)
    config = both.models[0].config
    # A value on a rounding's edge moves by a step of fp8 or fp4: rarely, and by little of a row.
    near, least, overlap = (1e-4, 0.99, 0.999) if precision == "unrounded" else (0.08, 0.97, 0.97)
    for n_tokens in sizes:
        both.begin(n_tokens)
        for layer in range(config.n_layers):
            found, wanted = both.attend(layer, row_of(both.models[0], n_tokens, layer))
            assert found.dtype == wanted.dtype
            assert not found.isnan().any()
            assert float((apart(found, wanted) < near).float().mean()) >= least, layer
            if layer in config.index_source_layers:
                assert shared_share(*both.chosen(layer)) >= overlap, layer
        both.end()
    one, other = both.sequences
    for layer in range(config.n_layers):
        assert float((apart(one.windows[layer], other.windows[layer]) < near).float().mean()) > 0.97
    for layer in config.kv_source_layers:
        n_groups = one.position // config.ratio(layer)
        for kind in ("rows", "keys"):
            rows = [getattr(each, kind)[layer][:n_groups] for each in both.sequences]
            assert float((apart(*rows) < 4 * near).float().mean()) > 0.97, (layer, kind)
        if layer in one.open_groups:
            n_open = one.position % config.ratio(layer)
            left = [each.open_groups[layer].kv[:n_open] for each in both.sequences]
            # A product's order of summation is torch's, and another for rows of another dtype.
            assert bool((apart(*left) < 1e-4).all())


@pytest.mark.parametrize("precision", ["highway", "wide"])
@pytest.mark.parametrize("most", [1 << 27, 50_000])
@torch.inference_mode()
def test_a_token_chooses_alone_what_it_chooses_in_a_chunk(
    precision: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_launches, "MOST_SCORES", most)
    model = model_of(precision, launches=True)
    config, n = model.config, model.numerics
    n_tokens, first = 700, 1600
    n_groups, n_heads, dim = first + n_tokens, config.index_n_heads, config.index_head_dim
    generator = torch.Generator().manual_seed(6)
    queries = torch.randn(n_tokens, n_heads * dim, generator=generator).to(CUDA)
    heads = torch.randn(n_tokens, n_heads, generator=generator).to(CUDA)
    keys = n.round_index(torch.randn(n_groups, dim, generator=generator)).to(CUDA, n.activation)
    positions = torch.arange(first, first + n_tokens, device=CUDA)
    n_blocks = -(-n_groups // config.candidate_block_size)
    every = torch.full((n_tokens, n_blocks), 9, dtype=torch.uint8, device=CUDA)
    for layer in (5, 7):  # both of ratio 1: the candidate source, and one that it binds
        site = model.blocks[layer].attention
        assert isinstance(site, LaunchedAttention)
        sources = SourceLaunches(config, layer, site.weights, n, lambda x, _matrix: x)
        turns = site.rotary.table(n_groups)
        together = sources.choose(heads, queries, positions, turns, keys, every)
        assert bool((together >= 0).all())
        for token in range(0, n_tokens, 53):
            part = slice(token, token + 1)
            kept = every[part].clone()
            seen = keys[: first + token + 1]
            alone = sources.choose(
                heads[part], queries[part], positions[part].clone(), turns, keys, kept
            )
            assert torch.equal(alone[0], together[token]), (layer, token)
            assert torch.equal(kept[0], every[token]), (layer, token)
            fewer = kept[:, : -(-len(seen) // config.candidate_block_size)].contiguous()
            alone = sources.choose(
                heads[part], queries[part], positions[part].clone(), turns, seen, fewer
            )
            assert torch.equal(alone[0], together[token]), (layer, token)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("n_tokens", [1, 9, 33, 1200])
@torch.inference_mode()
def test_what_a_chunk_launches_before_its_experts_waits_for_nobody(n_tokens: int) -> None:
    model = model_of("highway", launches=True)
    sequence = model.new_sequence(CONTEXT)
    for table in (model.plain_turns, model.yarn_turns):
        table.table(CONTEXT)  # a table that grows is made by the host
    for mode in ("default", "error"):  # the first launches compile, and bring constants over
        step = Step(sequence, n_tokens, None, None)  # type: ignore[arg-type]
        rows = [row_of(model, n_tokens, layer) for layer in range(model.config.n_layers)]
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for block, row in zip(model.blocks, rows, strict=True):
                block.attention(step, row)
                plan = block.moe.route(step, row) if block.moe._launches(row.x) else None
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if isinstance(plan, ChunkPlan):
            assert sum(plan.counts) == n_tokens * model.config.top_k
        sequence.position = step.end
