"""A request whose new ids go by a decoding: what it is told, and when."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from compute.experts.miss_client import IoCounters, MissClient, Waiting
from compute.frontend.text_stream import TextStream
from compute.frontend.tokenizer import Tokenizer
from compute.model.sequence import Sequence
from compute.sampler import Sampling
from compute.session import Engine, Finished, NewToken, Request
from tests.support.decode_rig import demo, demo_model
from tests.support.local_sources import LocalSources

PLAY = [0, 209, 711, 63, 1288, 278]
GREEDY = Sampling(temperature=0)


class Sources(LocalSources):
    """Local sources with the step's calls."""

    waiting = Waiting()
    io = IoCounters()

    def begin_step(self) -> None: ...

    def end_step(self) -> None: ...

    def check_cancelled(self) -> None: ...


class ToldDecoding:
    """Decodes by the model's own forward and writes down what it is told."""

    def __init__(self) -> None:
        self.model = demo_model("cpu")
        self.sources = Sources(demo())
        self.told: list[str] = []
        self._sequence = self.model.new_sequence(64)
        self._row = np.zeros(0, np.float32)

    def new_sequence(self) -> Sequence:
        self._sequence.reset()
        return self._sequence

    def takes(self, sequence: Sequence) -> bool:
        return sequence is self._sequence

    def expect(self, token: int) -> None:
        self.told.append(f"expect {token}")

    def values(self) -> dict[str, int | str]:
        return {}

    def step(self, token: int) -> ToldDecoding:
        self.told.append(f"step {token}")
        found = self.model.forward(self._sequence, [token], self.sources, self.sources)
        self._row = found[0].numpy()
        return self

    def finish(self) -> None:
        self.told.append("finish")

    def likeliest(self) -> int:
        return int(self._row.argmax())


@pytest.fixture
def made() -> tuple[Engine, ToldDecoding]:
    decoding = ToldDecoding()
    source = cast(MissClient, decoding.sources)
    engine = Engine(decoding.model, source, context=64, chunk=32, decoding=decoding)  # type: ignore[arg-type]
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
