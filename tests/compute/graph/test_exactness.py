"""The matrix that holds every way to decode to the first one."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from compute.experts.device_experts import DeviceExperts
from compute.graph.exactness import LEAST_TOKENS, Case, Outcome, run_matrix, sizes_of
from compute.graph.launches import Launches
from compute.graph.runner import Runner
from protocol.files.checkpoint import Checkpoint, open_checkpoint
from tests.support.arena_daemon import ArenaDaemon
from tests.support.decode_rig import close_rigs, demo, make_experts, model_of

PROMPT = [3, 911, 17]


def matrix(
    checkpoint: Checkpoint,
    device: str,
    n_tokens: int,
    *,
    sizes: list[int],
    share: float = 0.5,
    seconds: float = math.inf,
) -> list[Outcome]:
    """The matrix over an arena for a share of the experts, reads shuffled as well."""
    model = model_of(checkpoint, device)
    daemons: list[ArenaDaemon] = []

    @contextlib.contextmanager
    def opened(n_device: int) -> Iterator[DeviceExperts]:
        n_slots = max(3 * model.config.top_k, round(share * model.config.n_keys))
        daemons[:] = [ArenaDaemon(checkpoint, n_slots)]
        experts = make_experts(daemons[0], checkpoint, n_device, model.device)
        yield experts
        close_rigs()
        experts.places.release()

    def shuffle(seed: int | None) -> None:
        daemons[0].shuffle = None if seed is None else random.Random(seed)

    prompt = [token % model.config.vocab_size for token in PROMPT]
    return run_matrix(
        model,
        opened,
        sizes=sizes,
        n_tokens=n_tokens,
        prompt=prompt,
        shuffle=shuffle,
        seconds=seconds,
    )


def all_same(outcomes: list[Outcome], n_tokens: int) -> bool:
    assert [outcome.difference for outcome in outcomes if outcome.difference] == []
    whole = [outcome for outcome in outcomes if outcome.case.mode != "oracle"]
    assert {outcome.n_tokens for outcome in whole} == {n_tokens}
    return len({(outcome.ids, outcome.streams) for outcome in whole}) == 1


def test_sizes_are_none_least_half_and_all() -> None:
    assert sizes_of(256, 6, 10_000) == [0, 6, 128, 256]
    assert sizes_of(256, 6, 100) == [0, 6, 50, 100]
    assert sizes_of(256, 6, 4) == [0, 2, 4]
    assert sizes_of(256, 6, 0) == [0]


@pytest.mark.slow
def test_every_way_to_decode_gives_the_same_bits() -> None:
    outcomes = matrix(demo(), "cpu", 2, sizes=[0, 6, 256])
    assert all_same(outcomes, 2)
    assert len(outcomes) == 3 * (3 + 3 + 1)
    assert all(outcome.n_misses for outcome in outcomes if outcome.case.n_device < 256)
    assert {outcome.case.is_shuffled for outcome in outcomes} == {False, True}


@pytest.mark.slow
def test_where_time_is_short_every_way_takes_as_many_tokens_as_the_first() -> None:
    outcomes = matrix(demo(), "cpu", 200, sizes=[0], share=1, seconds=0)
    assert all_same(outcomes, LEAST_TOKENS)


@pytest.mark.parametrize("spoiled", ["streams", "ids"])
def test_a_difference_is_named_with_its_place(
    spoiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Launches.at_once
    likeliest = Runner.likeliest

    def other(launches: Launches, first: int, end: int) -> None:
        whole(launches, first, end)
        step = launches._step
        if launches.mode == "layer" and first == 5 and step.sequence.position == 4:
            step.buffers.middle[5].add_(1)

    def other_id(runner: Runner) -> int:
        return likeliest(runner) ^ (runner.mode == "layer" and runner.sequence.position == 4)

    if spoiled == "streams":
        monkeypatch.setattr(Launches, "at_once", other)
    else:
        monkeypatch.setattr(Runner, "likeliest", other_id)
    outcomes = matrix(demo(), "cpu", 2, sizes=[0], share=1)
    found = {outcome.case: outcome.difference for outcome in outcomes if outcome.difference}
    assert set(found) == {Case("layer", 0), Case("layer", 0, True)}
    place = "position 4 layer 5: hidden" if spoiled == "streams" else "position 4 layer 0: hidden"
    assert all(text.startswith(place) for text in found.values()), found


@pytest.mark.accept
@pytest.mark.timeout(1800)
def test_two_hundred_tokens_of_the_demo_and_of_the_tiny_model(tiny_dir: Path) -> None:
    for checkpoint in (demo(), open_checkpoint(tiny_dir)):
        own = checkpoint.config
        sizes = sizes_of(own.n_keys, own.top_k, own.n_keys)
        assert all_same(matrix(checkpoint, "cpu", 200, sizes=sizes), 200)


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["demo", "tiny"])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
def test_two_hundred_tokens_on_a_device(model: str, share: float, tiny_dir: Path) -> None:
    checkpoint = demo() if model == "demo" else open_checkpoint(tiny_dir)
    own = checkpoint.config
    sizes = sizes_of(own.n_keys, own.top_k, own.n_keys)
    assert all_same(matrix(checkpoint, "cuda", 200, sizes=sizes, share=share), 200)
