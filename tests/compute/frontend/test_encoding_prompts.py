"""Every golden prompt: the reference's text, or the server library's where the two part."""

from __future__ import annotations

from typing import Any

import pytest

from compute.frontend.encoding import Encoding, Prompt, RequestError
from tests.support.encoding_cases import (
    ASSISTANT,
    BEGIN,
    EFFORT_75,
    END,
    SYSTEM,
    USER,
    demo_tokenizer,
    golden,
    special_ranges,
)

ENCODING = Encoding(demo_tokenizer())
CASES = {case["name"]: case for case in golden("prompts.json")}
# No request of the three APIs can say these: task tokens, no BOS, only the rest of a talk,
# dropping switched off, tools on a message, a mode that does not exist.
UNSAYABLE = {"task", "bos", "context", "drop_thinking"}
# The server library's own answer is the right one. Why, by name.
HEADERS = "a server always opens a turn, before every assistant message and at the end"
PRINTED = "name, description and parameters of a tool are printed, strict schemas completed"
CHECKED = "the request is refused as the APIs refuse it"
MARKERS = "a spelled image marker stays text"
ALIASES = "the server's names for efforts are more"
FOLLOWS_LIBRARY = {
    HEADERS: [
        *("system_only_thinking", "system_only_chat", "system_then_assistant_no_user"),
        *("assistant_first_thinking", "assistant_first_chat", "ends_with_assistant_chat"),
        *("latest_reminder_last", "latest_reminder_after_user_then_assistant"),
        *("two_assistants_in_a_row", "empty_system_chat"),
    ],
    PRINTED: [
        *("history_reasoning_kept_by_tools", "tools_with_system", "tools_without_parameters"),
        *("tools_with_strict_and_extra_keys", "tools_system_later_only"),
        *("three_calls_results_in_order", "three_calls_results_shuffled"),
        *("response_format_and_tools", "namespace_conflict"),
    ],
    CHECKED: [
        *("null_system_chat", "missing_user_content", "assistant_null_content"),
        *("empty_messages", "three_calls_one_unknown_id", "shuffled_results_around_user_text"),
        *("result_null", "result_part_unsupported", "result_without_call", "result_first"),
        *("ends_with_call", "namespace_tools", "namespace_call", "parts_unsupported"),
        "image_two_and_result_order",
    ],
    MARKERS: [
        *("image_marker_literal_user", "image_marker_literal_in_result"),
        *("image_marker_literal_in_part", "image_marker_in_reasoning"),
    ],
    ALIASES: ["effort_xhigh", "effort_medium"],
}
# Repaired against the library: the reference's text, and then the server's open turn.
TURN_OPENED = [
    *("ends_with_assistant_thinking", "history_mid_system_counts_as_turn"),
    "history_last_turn_reasoning_kept",
]
# Ours alone, tested below.
OURS = [
    *("developer_first", "developer_last", "developer_before_last_user_thinking"),
    *("two_assistants_after_last_user", "image_url_between_text"),
]


def is_sayable(case: dict[str, Any]) -> bool:
    extra = {key for message in case["messages"] for key in message}
    told = extra & {"task", "tools", "response_format"} | set(case["options"]) & UNSAYABLE
    return not told and case["options"].get("mode") != "think"


def request_of(case: dict[str, Any]) -> dict[str, Any]:
    """The case as a Chat Completions request."""
    options = case["options"]
    body: dict[str, Any] = {
        "messages": [
            {("prefix" if key == "wo_eos" else key): value for key, value in message.items()}
            for message in case["messages"]
        ]
    }
    if case["tools"]:
        body["tools"] = case["tools"]
    if options.get("mode") == "chat":
        body["thinking"] = {"type": "disabled"}
    if "reasoning_effort" in options:
        body["reasoning_effort"] = options["reasoning_effort"]
    if "response_format" in options:
        wanted = options["response_format"]
        schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted}}
        body["response_format"] = wanted if wanted == {"type": "json_object"} else schema
    return body


def text_of(body: dict[str, Any]) -> str | None:
    """The prompt's text; None where the request is refused."""
    try:
        return ENCODING.chat(body).text
    except RequestError:
        return None


def names_like_reference() -> list[str]:
    others = {name for names in FOLLOWS_LIBRARY.values() for name in names}
    others |= {*TURN_OPENED, *OURS}
    return [name for name, case in CASES.items() if is_sayable(case) and name not in others]


def test_most_cases_are_held_to_the_reference() -> None:
    assert len([case for case in CASES.values() if is_sayable(case)]) == 132
    assert len(names_like_reference()) == 84


@pytest.mark.parametrize("name", names_like_reference())
def test_prompt_is_the_references(name: str) -> None:
    assert text_of(request_of(CASES[name])) == CASES[name].get("prompt")


@pytest.mark.parametrize("name", [name for names in FOLLOWS_LIBRARY.values() for name in names])
def test_prompt_is_the_server_librarys(name: str) -> None:
    case = CASES[name]
    assert case["library"] != "same" or "error" in case
    assert text_of(request_of(case)) == case["library"].get("prompt")


@pytest.mark.parametrize("name", TURN_OPENED)
def test_reasoning_since_the_last_turn_stays_and_a_turn_is_opened(name: str) -> None:
    assert text_of(request_of(CASES[name])) == CASES[name]["prompt"] + ASSISTANT + "<think>"


def test_reasoning_of_two_answers_in_a_row_stays() -> None:
    said = f"{USER}q{ASSISTANT}<think>ra</think>part one{END}"
    said += f"{ASSISTANT}<think>rb</think>part two{END}{ASSISTANT}<think>"
    text = text_of(request_of(CASES["two_assistants_after_last_user"]))
    assert text == BEGIN + EFFORT_75 + said


def test_developer_is_another_name_of_system() -> None:
    text = text_of(request_of(CASES["developer_first"]))
    assert text == f"{BEGIN}{SYSTEM}Only answer in verse.{USER}Go{ASSISTANT}</think>"


def test_images_are_refused() -> None:
    with pytest.raises(RequestError, match="images cannot be read yet"):
        ENCODING.chat(request_of(CASES["image_url_between_text"]))


def with_ranges() -> list[str]:
    return [name for name in names_like_reference() if CASES[name].get("special_ranges")]


@pytest.mark.parametrize("name", with_ranges())
def test_only_markers_of_the_template_are_special(name: str) -> None:
    prompt = ENCODING.chat(request_of(CASES[name]))
    assert special_ranges(prompt) == CASES[name]["special_ranges"]
    tokenizer = demo_tokenizer()
    found = [token_id for token_id in prompt.ids if token_id in tokenizer.special_ids]
    assert len(found) == len(special_ranges(prompt))
    assert tokenizer.decode(prompt.ids, special=True) == prompt.text


SERVER_CASES = {case["name"]: case for case in golden("requests.json")}


@pytest.mark.parametrize("name", [name for name in SERVER_CASES if name != "effort_integer"])
def test_request_fields_mean_what_they_mean_to_the_vendor(name: str) -> None:
    case = SERVER_CASES[name]
    if "refuses" in case:
        with pytest.raises(RequestError):
            ENCODING.chat(case["request"])
        return
    prompt: Prompt = ENCODING.chat(case["request"])
    assert prompt.text == case["prompt"]
    assert special_ranges(prompt) == case["special_ranges"]
    kind = None if prompt.constraint is None else prompt.constraint.kind
    assert kind == case["constraint"]
