"""The engine goes on from kept states: the demo, its experts read from the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from compute.experts.miss_client import IoCounters, MissClient, RequestCancelled, Waiting
from compute.model.sequence import Sequence
from compute.prefix.cache import PrefixCache
from compute.prefix.snapshot import restore, take_front, take_span
from compute.sampler import Sampling
from compute.session import Engine, Finished, NewToken, Request
from protocol.errors import ShardError
from tests.support.local_model import LocalModel
from tests.support.local_sources import LocalSources

DEMO = Path(__file__).resolve().parents[3] / "demo"
GREEDY = Sampling(temperature=0)
CHUNK = 32
CLOSE = {"highway": 0.25, "unrounded": 1e-4}  # largest difference of two logits, cut elsewhere


class StepSources(LocalSources):
    waiting = Waiting()
    io = IoCounters()
    broken = False

    def begin_step(self) -> None:
        if self.broken:
            raise ShardError("layer 0 expert 0: EIO")

    def end_step(self) -> None:
        pass

    def check_cancelled(self) -> None:
        if self.waiting.cancelled():
            raise RequestCancelled


class Watched(Engine):
    """Keeps the logits of the last forward of each request's prompt."""

    first: Any = None

    def logits(self, sequence: Sequence, ids: Any, *, every: bool = False) -> Any:
        row = super().logits(sequence, ids, every=every)
        if len(ids) > 1 or self.first is None:
            self.first = row
        return row


@pytest.fixture(scope="module")
def local() -> LocalModel:
    return LocalModel(DEMO)


@pytest.fixture(scope="module")
def sources(local: LocalModel) -> StepSources:
    return StepSources(local.checkpoint)


def engine_of(
    local: LocalModel,
    sources: StepSources,
    precision: str,
    budget: int | None = 1 << 30,
    chunk: int = CHUNK,
) -> Watched:
    prefixes = None if budget is None else PrefixCache(budget)
    source = cast(MissClient, sources)
    return Watched(local.at(precision), source, context=600, chunk=chunk, prefixes=prefixes)


def answer(engine: Watched, ids: list[int], n: int = 3) -> tuple[list[int], int]:
    """Greedy ids and the prompt tokens that were known."""
    engine.first = None
    events = list(engine.generate(Request(ids, GREEDY, n)))
    assert isinstance(events[-1], Finished)
    new = [event.choice.id for event in events if isinstance(event, NewToken)]
    return new, events[-1].n_cached


def text_of(n: int, seed: int = 0) -> list[int]:
    return [0, *np.random.default_rng(seed).integers(20, 4000, n - 1).tolist()]


def state_of(sequence: Sequence) -> list[torch.Tensor]:
    n = sequence.position
    found = [*sequence.windows]
    for layer in sequence.rows:
        found += [sequence.rows[layer], sequence.keys[layer]]
    for layer, group in sequence.open_groups.items():
        n_open = n % sequence.config.ratio(layer)
        found += [group.kv[:n_open], group.scores[:n_open]]
    return [*found, torch.from_numpy(sequence.last_ids.copy())]


@pytest.mark.parametrize("precision", ["highway", "wide", "unrounded"])
@pytest.mark.parametrize("cuts", [(1,), (30, 35), (7, 64, 30), (100, 1)])
def test_a_restored_state_has_the_bits_of_the_one_that_was_kept(local, precision, cuts) -> None:
    model = local.at(precision)
    sequence, spans, ids = model.new_sequence(300), [], text_of(sum(cuts))
    for size in cuts:
        first = sequence.position
        local.cut(model, ids[first : first + size], [size], sequence=sequence)
        spans.append(take_span(sequence, first))
    front = take_front(sequence)
    restored = model.new_sequence(300)
    restore(restored, spans, front)
    for kept, back in zip(state_of(sequence), state_of(restored), strict=True):
        assert kept.dtype == back.dtype
        assert kept.contiguous().view(torch.uint8).equal(back.contiguous().view(torch.uint8))
    more = text_of(20, 1)
    for size in (1, 19):
        assert local.cut(model, more[:size], [size], sequence=sequence).equal(
            local.cut(model, more[:size], [size], sequence=restored)
        )


PLACES = (70, 75, 99, 113, 128, 132, 160, 191, 198, 231, 255, 269)  # of the 200 before the end
FEWER = (75, 128, 191, 231, 269)


@pytest.mark.parametrize(
    ("precision", "chunk", "places"),
    [
        pytest.param("highway", 32, FEWER, marks=pytest.mark.accept),
        ("unrounded", 33, PLACES[1::3]),
        pytest.param("highway", 32, PLACES, marks=pytest.mark.accept),
    ],
)
def test_after_a_divergence_anywhere_the_bits_are_those_of_a_cold_run(
    local, sources, precision, chunk, places
) -> None:
    warm = engine_of(local, sources, precision, chunk=chunk)
    cold = engine_of(local, sources, precision, None, chunk)
    base = text_of(270)
    assert answer(warm, base, 1)[1] == 0
    for number, place in enumerate(places):
        ids = base[:place] + text_of(12 + number % 2, seed=number + 2)[1:]
        got, n_cached = answer(warm, ids, 2)
        row = warm.first
        wanted, nothing = answer(cold, ids, 2)
        assert nothing == 0
        assert n_cached == place // chunk * chunk
        assert got == wanted
        assert np.array_equal(row, cold.first)


@pytest.mark.parametrize(
    ("precision", "n_turns"),
    [("highway", 12), ("unrounded", 6), pytest.param("highway", 20, marks=pytest.mark.accept)],
)
def test_growing_turns_go_on_from_the_end_of_the_turn_before(
    local, sources, precision, n_turns
) -> None:
    warm, cold = engine_of(local, sources, precision), engine_of(local, sources, precision, None)
    ids, end = text_of(60), 0
    for turn in range(n_turns):
        new, n_cached = answer(warm, ids, 2)
        row = warm.first
        assert n_cached == end
        if turn % 6 == 5:
            assert new == answer(cold, ids, 2)[0]
            assert np.abs(row - cold.first).max() < CLOSE[precision]
        end = len(ids) + len(new) - 1  # the last id was never taken in
        ids = ids + new + text_of(6 + turn % 3, seed=turn)[1:]


def test_thirty_divergent_turns_reuse_the_chunks_before_them(local, sources) -> None:
    engine = engine_of(local, sources, "unrounded")
    base = text_of(200)
    answer(engine, base, 1)
    known = [answer(engine, [*base[: 199 - n], 5, 6 + n], 1)[1] for n in range(30)]
    assert known == [(199 - n) // CHUNK * CHUNK for n in range(30)]


def test_the_same_prompt_again_computes_its_last_chunk_only(local, sources) -> None:
    engine = engine_of(local, sources, "highway")
    for n in (64, 65, 90):
        ids = text_of(n, seed=n)
        first = answer(engine, ids)
        again = answer(engine, ids)
        assert again == (first[0], (n - 1) // CHUNK * CHUNK)


def test_a_small_budget_is_kept_and_changes_no_answer(local, sources) -> None:
    roomy = engine_of(local, sources, "highway")
    ids = text_of(70)
    wanted = answer(roomy, ids, 2)[0]
    assert roomy.prefixes is not None
    whole = roomy.prefixes.tree.n_bytes
    for budget in (1, whole // 2):
        engine = engine_of(local, sources, "highway", budget)
        assert engine.prefixes is not None
        for _ in range(2):
            assert answer(engine, ids, 2)[0] == wanted
            assert engine.prefixes.tree.n_bytes <= budget


def test_a_request_that_fails_or_is_left_keeps_what_it_finished(local, sources) -> None:
    engine = engine_of(local, sources, "unrounded")
    ids = text_of(100)
    left: Any = engine.generate(Request(ids, GREEDY, 3))
    next(left), next(left)
    left.close()
    assert answer(engine, ids, 1)[1] == 2 * CHUNK
    sources.broken = True
    try:
        with pytest.raises(ShardError):
            answer(engine, [*ids, 9])
    finally:
        sources.broken = False
    assert answer(engine, [*ids, 9], 1)[1] == len(ids)


def test_kept_states_are_as_small_as_the_specification_says(local, sources) -> None:
    engine = engine_of(local, sources, "highway")
    model, ids = engine.model, text_of(100)
    sequence = model.new_sequence(100)
    local.cut(model, ids, [100], sequence=sequence)
    config = local.config
    row, key = config.head_dim // 2 + config.head_dim // 16, config.index_head_dim * 17 // 32
    assert take_span(sequence, 0).n_bytes == (row + key) * (50 + 100)
    ring = config.head_dim + config.head_dim // 32
    assert take_front(sequence).n_bytes == config.n_layers * config.sliding_window * ring
