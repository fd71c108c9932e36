"""A request whose new ids go by a decoding: what it is told, and when."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from compute.experts.miss_client import IoCounters, MissClient, Waiting
from compute.frontend.text_stream import TextStream
from compute.frontend.tokenizer import Tokenizer
from compute.logit_rules import LogitRules
from compute.model.sequence import Sequence
from compute.sampler import Sampling, choose
from compute.session import Engine, Finished, NewToken, Request
from tests.support.decode_rig import demo, demo_model
from tests.support.local_sources import LocalSources

PLAY = [0, 209, 711, 63, 1288, 278]
GREEDY = Sampling(temperature=0)
DRAWN = Sampling(temperature=0.9, top_p=0.95, seed=3)


class Sources(LocalSources):
    """Local sources with the step's calls."""

    waiting = Waiting()
    io = IoCounters()

    def begin_step(self) -> None: ...

    def end_step(self) -> None: ...

    def check_cancelled(self) -> None: ...


class ToldLogits:
    """Logits that write down what is taken of them."""

    def __init__(
        self, row: np.ndarray, position: int, sampling: Sampling | None, told: list[str]
    ) -> None:
        self._row, self._position, self._sampling, self._told = row, position, sampling, told

    def likeliest(self) -> int:
        return int(self._row.argmax())

    def drawn(self) -> int:
        assert self._sampling is not None
        self._told.append("drawn")
        return choose(self._row, self._position, self._sampling).id

    def values(self) -> np.ndarray:
        self._told.append("values")
        return self._row


class ToldDecoding:
    """Decodes by the model's own forward and writes down what it is told."""

    def __init__(self) -> None:
        self.model = demo_model("cpu")
        self.sources = Sources(demo())
        self.told: list[str] = []
        self._sequence = self.model.new_sequence(64)

    def new_sequence(self) -> Sequence:
        self._sequence.reset()
        return self._sequence

    def takes(self, sequence: Sequence) -> bool:
        return sequence is self._sequence

    def expect(self, token: int) -> None:
        self.told.append(f"expect {token}")

    def values(self) -> dict[str, int | str]:
        return {}

    def step(self, token: int, sampling: Sampling | None = None) -> ToldLogits:
        self.told.append(f"step {token}")
        found = self.model.forward(self._sequence, [token], self.sources, self.sources)
        return ToldLogits(found[0].numpy(), self._sequence.position, sampling, self.told)

    def finish(self) -> None:
        self.told.append("finish")


@pytest.fixture
def made() -> tuple[Engine, ToldDecoding]:
    decoding = ToldDecoding()
    source = cast(MissClient, decoding.sources)
    engine = Engine(decoding.model, source, context=64, chunk=32, decoding=decoding)
    return engine, decoding


def test_the_next_step_is_expected_before_anybody_is_told_the_id(
    made: tuple[Engine, ToldDecoding],
) -> None:
    engine, decoding = made
    ids = []
    for event in engine.generate(Request(PLAY, GREEDY, max_tokens=3)):
        if isinstance(event, NewToken):
            ids.append(event.choice.id)
            decoding.told.append(f"told {event.choice.id}")
    first, second, third = ids
    assert decoding.told == [
        f"expect {first}", f"told {first}", f"step {first}",
        f"expect {second}", f"told {second}", f"step {second}",
        f"told {third}", "finish",
    ]  # fmt: skip


def test_nothing_is_expected_after_a_stop(made: tuple[Engine, ToldDecoding]) -> None:
    engine, decoding = made
    events = list(engine.generate(Request(PLAY, GREEDY, max_tokens=4)))
    ids = [event.choice.id for event in events if isinstance(event, NewToken)]
    decoding.told.clear()
    *_, last = engine.generate(Request(PLAY, GREEDY, max_tokens=9, stop_ids=frozenset({ids[1]})))
    assert isinstance(last, Finished)
    assert last.reason == "stop"
    assert decoding.told == [f"expect {ids[0]}", f"step {ids[0]}", "finish"]
    decoding.told.clear()
    text = TextStream(Tokenizer.of(demo()), ("I will",))
    *_, last = engine.generate(Request(PLAY, GREEDY, max_tokens=9, text=text))
    assert isinstance(last, Finished)
    assert last.reason == "stop"
    assert decoding.told[-2].startswith("step")
    assert decoding.told[-1] == "finish"


def ids_of(engine: Engine, request: Request) -> list[int]:
    events = engine.generate(request)
    return [event.choice.id for event in events if isinstance(event, NewToken)]


def test_a_plain_draw_is_the_decodings_and_any_other_the_hosts(
    made: tuple[Engine, ToldDecoding],
) -> None:
    engine, decoding = made
    taken = {}
    for name, request in {
        "drawn": Request(PLAY, DRAWN, max_tokens=5),
        "reported": Request(PLAY, DRAWN, max_tokens=5, logprobs=True),
        "ruled": Request(PLAY, DRAWN, max_tokens=5, rules=LogitRules()),
        "greedy": Request(PLAY, GREEDY, max_tokens=5),
    }.items():
        decoding.told.clear()
        taken[name] = ids_of(engine, request), {"drawn", "values"} & set(decoding.told)
    ids = taken["drawn"][0]
    assert taken["drawn"] == (ids, {"drawn"})
    assert taken["reported"] == taken["ruled"] == (ids, {"values"})
    assert taken["greedy"][1] == set()
    assert taken["greedy"][0] != ids


def test_drawn_ids_are_those_without_a_decoding(made: tuple[Engine, ToldDecoding]) -> None:
    engine, decoding = made
    source = cast(MissClient, decoding.sources)
    plain = Engine(decoding.model, source, context=64, chunk=32)
    request = Request(PLAY, DRAWN, max_tokens=8)
    assert ids_of(engine, request) == ids_of(plain, request)
