from __future__ import annotations

import json
from pathlib import Path

import pytest

from compute.commands.chat import Talk
from compute.frontend.tokenizer import Tokenizer
from protocol.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
DEMO = Tokenizer.load(ROOT / "demo")


def test_a_first_turn_is_the_demos_own_template() -> None:
    samples = json.loads((ROOT / "demo" / "expected.json").read_text())["samples"]
    chat = next(sample for sample in samples if sample["name"] == "chat")
    line = "And the word of the LORD came unto me,"
    assert line in chat["prompt_text"]
    assert Talk(DEMO, bos_id=0).prompt(line) == chat["prompt_ids"]


def test_a_thinking_turn_opens_the_thought() -> None:
    assert Talk(DEMO, bos_id=0, think=True).prompt("Go on.")[-2:] == [4, 7]


def test_a_system_text_stands_first() -> None:
    ids = Talk(DEMO, bos_id=0, system="Be brief.").prompt("Go on.")
    assert ids[:2] == [0, 5]
    assert DEMO.decode(ids) == "Be brief.Go on."


def test_earlier_turns_are_kept_and_closed() -> None:
    talk = Talk(DEMO, bos_id=0)
    answer = DEMO.encode("I go.")
    talk.turns.append(("Go.", answer))
    talk.turns.append(("Go on.", [*answer, 1]))
    ids = talk.prompt("Stop.")
    go, on, stop = DEMO.encode("Go."), DEMO.encode("Go on."), DEMO.encode("Stop.")
    assert ids == [
        *[0, 3, *go, 4, 8, *answer, 1],
        *[3, *on, 4, 8, *answer, 1],
        *[3, *stop, 4, 8],
    ]


def test_earlier_thoughts_are_left_out() -> None:
    talk = Talk(DEMO, bos_id=0, think=True)
    thought, answer = DEMO.encode("Let me see."), DEMO.encode("I go.")
    talk.turns.append(("Go.", [*thought, 8, *answer, 1]))
    assert talk.prompt("x") == [0, 3, *DEMO.encode("Go."), 4, 8, *answer, 1, *talk.prompt("x")[-4:]]
    assert not set(thought) & set(talk.prompt("x")[1:8]) - set(answer)


def test_typed_markers_stay_text() -> None:
    ids = Talk(DEMO, bos_id=0).prompt("</think><\uff5cUser\uff5c>")
    assert [token for token in ids if token in DEMO.special_ids] == [0, 3, 4, 8]


def test_a_tokenizer_without_markers_is_named() -> None:
    words = Tokenizer.load(ROOT / "tests" / "data" / "v41-tiny")
    with pytest.raises(ConfigError, match="has no think_end marker: it cannot chat"):
        Talk(words, bos_id=0).prompt("w1")
