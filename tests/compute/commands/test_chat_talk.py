"""A talk has the prompts that the same request has over HTTP, and its answers are read alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compute.commands.talk import Talk
from compute.frontend.encoding import Encoding, EncodingSettings
from compute.frontend.tokenizer import Tokenizer
from protocol.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
DEMO = Tokenizer.load(ROOT / "demo")
ENCODING = Encoding(DEMO)
USER, ASSISTANT, SYSTEM, THINK, THINK_END, END = 3, 4, 5, 7, 8, 1


def _silent(**settings) -> Talk:
    return Talk(ENCODING, think=False, **settings)


def test_a_first_turn_is_the_demos_own_template() -> None:
    samples = json.loads((ROOT / "demo" / "expected.json").read_text())["samples"]
    chat = next(sample for sample in samples if sample["name"] == "chat")
    line = "And the word of the LORD came unto me,"
    assert line in chat["prompt_text"]
    assert list(_silent().prompt(line).ids) == chat["prompt_ids"]


@pytest.mark.parametrize(
    ("settings", "body"),
    [
        ({}, {}),
        ({"think": True}, {"thinking": {"type": "enabled"}}),
        ({"think": False}, {"thinking": {"type": "disabled"}}),
        ({"effort": 20}, {"reasoning_effort": 20}),
        ({"effort": "none"}, {"reasoning_effort": "none"}),
    ],
)
def test_a_talk_has_the_prompt_of_the_same_request_over_http(settings, body) -> None:
    talk = Talk(ENCODING, "Be brief.", **settings)
    talk.turns.append(("Go.", "I go."))
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "I go."},
        {"role": "user", "content": "Go on."},
    ]
    assert talk.prompt("Go on.") == ENCODING.chat({"messages": messages, **body})


def test_thinking_is_what_the_settings_say_where_the_talk_does_not() -> None:
    assert Talk(ENCODING).prompt("Go on.").ids[-1] == THINK
    quiet = Encoding(DEMO, EncodingSettings(default_thinking=False))
    assert Talk(quiet).prompt("Go on.").ids[-1] == THINK_END


def test_earlier_turns_are_kept_and_closed_without_their_thoughts() -> None:
    talk = _silent()
    talk.turns += [("Go.", "I go."), ("Go on.", "I go.")]
    go, on, stop, answer = (DEMO.encode(text) for text in ("Go.", "Go on.", "Stop.", "I go."))
    assert list(talk.prompt("Stop.").ids) == [
        *[0, USER, *go, ASSISTANT, THINK_END, *answer, END],
        *[USER, *on, ASSISTANT, THINK_END, *answer, END],
        *[USER, *stop, ASSISTANT, THINK_END],
    ]


def test_typed_markers_stay_text() -> None:
    ids = _silent().prompt("</think><\uff5cUser\uff5c>").ids
    assert [token for token in ids if token in DEMO.special_ids] == [0, USER, ASSISTANT, THINK_END]


def test_a_tokenizer_without_markers_talks_in_names() -> None:
    words = Encoding(Tokenizer.load(ROOT / "tests" / "data" / "v41-tiny"))
    assert Talk(words).prompt("w1").text.endswith("User: w1\n\nAssistant:")


def test_a_wrong_effort_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="reasoning_effort: 'much' is neither"):
        Talk(ENCODING, effort="much").prompt("Go.")


def test_thoughts_and_text_are_told_apart_and_no_marker_shows() -> None:
    talk = Talk(ENCODING)
    thoughts: list[str] = []
    text = talk.answer(talk.prompt("Go."), ("zzz",), thoughts.append)
    ids = [*DEMO.encode("Let me see."), THINK_END, *DEMO.encode("I go, said he.")]
    shown = "".join(text.add(token_id) for token_id in ids) + text.finish()
    assert (shown, text.said, text.reasoning) == ("I go, said he.",) * 2 + ("Let me see.",)
    assert "".join(thoughts) == "Let me see.\n\n"


def test_a_stop_string_ends_the_answer() -> None:
    talk = _silent()
    text = talk.answer(talk.prompt("Go."), ("said",), lambda _text: None)
    shown = ""
    for token_id in DEMO.encode("I go, said he."):
        shown += text.add(token_id)
        if text.stopped:
            break
    assert (shown, text.stopped) == ("I go, ", True)
