"""The engine on the demo model, its experts read from the files: no daemon is needed here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from compute.config import ComputeConfig
from compute.experts.miss_client import IoCounters, MissClient, RequestCancelled, Waiting
from compute.frontend.text_stream import TextStream
from compute.frontend.tokenizer import Tokenizer
from compute.load import find_context, load_model
from compute.model.sources import ExpertMatrices
from compute.sampler import Sampling, choose
from compute.session import Engine, Event, Finished, NewToken, Prefilled, Request
from protocol.errors import ConfigError, ShardError
from protocol.files.checkpoint import open_checkpoint
from tests.support.local_sources import LocalSources

ROOT = Path(__file__).resolve().parents[2]
GREEDY = Sampling(temperature=0)
PLAY = [0, 209, 711, 63, 1288, 278]


class StepSources(LocalSources):
    """Local sources with the step's calls that the engine makes of a MissClient."""

    waiting = Waiting()
    io = IoCounters()
    n_steps = 0
    fail_at: int | None = None

    def begin_step(self) -> None:
        self.n_steps += 1

    def end_step(self) -> None:
        pass

    def check_cancelled(self) -> None:
        if self.waiting.cancelled():
            raise RequestCancelled

    def stream(self, layer: int, experts: list[int]) -> Iterator[tuple[int, ExpertMatrices]]:  # type: ignore[override]
        self.check_cancelled()
        if self.n_steps == self.fail_at:
            raise ShardError(f"layer {layer} expert {experts[0]}: EIO")
        return super().stream(layer, experts)


@pytest.fixture(scope="module")
def made() -> tuple[Engine, Tokenizer]:
    checkpoint = open_checkpoint(ROOT / "demo")
    model = load_model(checkpoint, ComputeConfig(precision="unrounded"))
    source = cast(MissClient, StepSources(checkpoint))
    return Engine(model, source, context=256, chunk=64), Tokenizer.load(ROOT / "demo")


@pytest.fixture
def engine(made: tuple[Engine, Tokenizer]) -> Engine:
    return made[0]


@pytest.fixture
def tokenizer(made: tuple[Engine, Tokenizer]) -> Tokenizer:
    return made[1]


def _ids(events: list[Event]) -> list[int]:
    return [event.choice.id for event in events if isinstance(event, NewToken)]


def _text(events: list[Event]) -> str:
    return "".join(event.text for event in events if not isinstance(event, Prefilled))


def _end(events: list[Event]) -> Finished:
    assert isinstance(events[-1], Finished)
    assert not any(isinstance(event, Finished) for event in events[:-1])
    return events[-1]


def _expected(name: str) -> dict[str, list[int]]:
    samples = json.loads((ROOT / "demo" / "expected.json").read_text())["samples"]
    sample = next(sample for sample in samples if sample["name"] == name)
    return {"prompt": sample["prompt_ids"], "ids": sample["unrounded"]["continuation_ids"]}


def test_greedy_continuations_are_the_expected_ones(engine: Engine) -> None:
    for name in ("play", "scripture"):
        wanted = _expected(name)
        events = list(engine.generate(Request(wanted["prompt"], GREEDY, max_tokens=48)))
        assert _ids(events) == wanted["ids"]
        end = _end(events)
        assert (end.reason, end.n_new, end.n_prompt) == ("length", 48, len(wanted["prompt"]))
        assert end.tokens_per_second > 0


def test_the_chunks_of_a_prompt_do_not_change_the_text(engine: Engine) -> None:
    wanted = list(engine.generate(Request(PLAY, GREEDY, max_tokens=8)))
    for chunk in (1, 4, 5):
        small = Engine(engine.model, engine.source, context=64, chunk=chunk)
        events = list(small.generate(Request(PLAY, GREEDY, max_tokens=8)))
        assert _ids(events) == _ids(wanted)
        done = [event.n_done for event in events if isinstance(event, Prefilled)]
        assert done == sorted({min(n, 6) for n in range(chunk, 6 + chunk, chunk)})


def test_text_streams_and_ends_at_a_stop_string(engine: Engine, tokenizer: Tokenizer) -> None:
    text = TextStream(tokenizer, ["\n\nKING"])
    events = list(engine.generate(Request(PLAY, GREEDY, text=text)))
    assert _text(events) == "I will not be so bold to be a man."
    assert _end(events).reason == "stop"


def test_without_its_stop_string_held_text_is_let_out(engine: Engine, tokenizer: Tokenizer) -> None:
    request = Request(PLAY, GREEDY, max_tokens=3, text=TextStream(tokenizer, ["notXYZ", "t b"]))
    plain = Request(PLAY, GREEDY, max_tokens=3, text=TextStream(tokenizer))
    assert _text(list(engine.generate(request))) == _text(list(engine.generate(plain)))


def test_a_stop_id_ends_the_text_and_is_the_last_id(engine: Engine, tokenizer: Tokenizer) -> None:
    ids = _ids(list(engine.generate(Request(PLAY, GREEDY, max_tokens=6))))
    request = Request(PLAY, GREEDY, stop_ids=frozenset({ids[4]}), text=TextStream(tokenizer))
    events = list(engine.generate(request))
    assert _ids(events) == ids[:5]
    assert _text(events) == tokenizer.decode(ids[:4])
    assert _end(events).reason == "stop"


def test_the_context_ends_a_text(engine: Engine) -> None:
    small = Engine(engine.model, engine.source, context=10, chunk=64)
    events = list(small.generate(Request(PLAY, GREEDY)))
    assert len(_ids(events)) == 4
    assert _end(events).reason == "length"
    assert _ids(list(small.generate(Request(PLAY + [1] * 4, GREEDY)))) == []


def test_prompts_that_do_not_fit_are_refused_before_any_work(engine: Engine) -> None:
    for prompt, message in (
        ([], "prompt is empty"),
        ([1] * 257, "prompt has 257 tokens, the context 256"),
        ([0, 4096], "id 4096 at place 1 is outside the vocabulary of 4096"),
        ([-1], "id -1 at place 0"),
    ):
        before = cast(StepSources, engine.source).n_steps
        with pytest.raises(ConfigError, match=message):
            engine.generate(Request(prompt, GREEDY))
        assert cast(StepSources, engine.source).n_steps == before


def test_sampling_repeats_with_its_seed(engine: Engine) -> None:
    def ids(seed: int) -> list[int]:
        sampling = Sampling(temperature=0.8, top_p=0.9, seed=seed)
        return _ids(list(engine.generate(Request(PLAY, sampling, max_tokens=12))))

    assert ids(3) == ids(3)
    assert ids(3) != ids(4)


def test_logprobs_come_when_asked(engine: Engine) -> None:
    sampling = Sampling(temperature=0, top_logprobs=2)
    events = list(engine.generate(Request(PLAY, sampling, max_tokens=2, logprobs=True)))
    choices = [event.choice for event in events if isinstance(event, NewToken)]
    for choice in choices:
        assert choice.logprob is not None
        assert choice.top[0] == (choice.id, choice.logprob)
        assert len(choice.top) == 2


@pytest.mark.parametrize("after", [0, 1, 20])
def test_a_cancelled_request_ends_and_the_next_one_runs(engine: Engine, after: int) -> None:
    """The question is asked before each layer, so `after` answers cut prefill and decode."""
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > after

    events = list(engine.generate(Request(PLAY, GREEDY, cancelled=cancelled)))
    assert _end(events).reason == "cancelled"
    assert asked == after + 1
    assert len(_ids(list(engine.generate(Request(PLAY, GREEDY, max_tokens=2))))) == 2


def test_a_failed_request_leaves_the_engine_usable(engine: Engine) -> None:
    source = cast(StepSources, engine.source)
    source.fail_at = source.n_steps + 3
    events = engine.generate(Request(PLAY, GREEDY))
    with pytest.raises(ShardError, match="layer 0 expert"):
        list(events)
    assert len(_ids(list(engine.generate(Request(PLAY, GREEDY, max_tokens=2))))) == 2


def test_the_id_is_a_function_of_the_logits_at_its_position(engine: Engine) -> None:
    sampling = Sampling(temperature=1, seed=9)
    ids = _ids(list(engine.generate(Request(PLAY, sampling, max_tokens=5))))
    sequence = engine.new_sequence()
    rows = engine.logits(sequence, PLAY + ids, every=True)
    assert rows.dtype == np.float32
    again = [choose(rows[p - 1], p, sampling).id for p in range(len(PLAY), len(PLAY) + 5)]
    assert again == ids


def test_a_context_beyond_the_models_limit_is_refused() -> None:
    checkpoint = open_checkpoint(ROOT / "demo")
    assert find_context(checkpoint, ComputeConfig()) == 4096
    with pytest.raises(ConfigError, match="the model takes at most"):
        find_context(checkpoint, ComputeConfig(context=2**24))
