"""The three APIs' requests, and each repair over the server library."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest

from compute.frontend.encoding import Encoding, EncodingSettings, RequestError, Start, read_efforts
from protocol.errors import ConfigError
from tests.support.encoding_cases import (
    ASSISTANT,
    BEGIN,
    DSML,
    EFFORT,
    EFFORT_75,
    END,
    SYSTEM,
    USER,
    demo_tokenizer,
    tokenizer_without,
)

ENCODING = Encoding(demo_tokenizer())
HI = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
CHAT_TOOLS = [{"type": "function", "function": {"name": "ring", "parameters": SCHEMA}}]
MESSAGES_TOOLS = [{"name": "ring", "input_schema": SCHEMA}]
RESPONSES_TOOLS = [{"type": "function", "name": "ring", "parameters": SCHEMA}]
OFF = {"thinking": {"type": "disabled"}}
CHAT_HI = f"{BEGIN}{USER}Hi{ASSISTANT}</think>"
THINK_HI = f"{BEGIN}{EFFORT_75}{USER}Hi{ASSISTANT}<think>"


def chat(*messages: dict[str, Any], **fields: Any) -> str:
    return ENCODING.chat({"messages": list(messages), **fields}).text


def effort_line(effort: int) -> str:
    return f"{BEGIN}{SYSTEM}{EFFORT.format(effort)}\n\n{USER}Hi{ASSISTANT}<think>"


def test_the_three_apis_make_the_same_prompt() -> None:
    assert ENCODING.chat({"messages": [HI]}).text == THINK_HI
    assert ENCODING.messages({"messages": [HI], "max_tokens": 9}).text == THINK_HI
    assert ENCODING.responses({"input": "Hi"}).text == THINK_HI
    assert ENCODING.responses({"input": [HI], "reasoning": {"effort": "none"}}).text == CHAT_HI


def test_fields_that_shape_no_prompt_are_left_to_others() -> None:
    body = {"model": 5, "n": 3, "temperature": "hot", "logit_bias": [], "stop": 7, "user": {}}
    assert chat(HI, **body) == THINK_HI
    assert chat(HI, tools=None, tool_choice=None, response_format=None) == THINK_HI


@pytest.mark.parametrize("body", [None, [], "x", {}, {"messages": []}, {"messages": [5]}])
def test_a_body_without_messages_is_refused(body: Any) -> None:
    for encode in (ENCODING.chat, ENCODING.messages):
        with pytest.raises(RequestError):
            encode(body)


def test_a_response_without_input_is_refused() -> None:
    with pytest.raises(RequestError, match="input or instructions"):
        ENCODING.responses({})


@pytest.mark.parametrize("field", ["previous_response_id", "conversation", "prompt"])
def test_a_request_that_builds_on_stored_state_is_refused(field: str) -> None:
    with pytest.raises(RequestError, match="stores no responses"):
        ENCODING.responses({"input": "Hi", field: "resp_1"})


def test_a_reference_to_a_stored_item_is_refused() -> None:
    with pytest.raises(RequestError, match="stores no responses"):
        ENCODING.responses({"input": [HI, {"type": "item_reference", "id": "x"}]})


WHOLE_BODIES: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "json"}]},
            {"role": "assistant", "content": "a", "reasoning_content": "r", "prefix": True},
        ],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        "reasoning_effort": "low",
        "chat_template_kwargs": {"thinking": True},
    },
    "messages": {
        "system": [{"type": "text", "text": "s"}],
        "messages": [HI, {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}]}],
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        "thinking": {"type": "enabled"},
    },
    "responses": {
        "instructions": "i",
        "input": [HI, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}],
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    },
}
JUNK: list[Any] = [
    None,
    True,
    1.5,
    2**80,
    1e999,
    "",
    "x",
    "\ud800",
    [],
    {},
    [None],
    {"type": ["x"]},
    [[{}]],
]


@pytest.mark.parametrize("api", WHOLE_BODIES)
def test_whatever_stands_in_a_body_is_read_or_refused(api: str) -> None:
    luck = random.Random(api)
    encodings = [ENCODING, Encoding(tokenizer_without()), Encoding(tokenizer_without(DSML))]
    statuses = []
    for _ in range(600):
        body = copy.deepcopy(WHOLE_BODIES[api])
        holder: Any = body
        while True:
            key = luck.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
            if not holder[key] or not isinstance(holder[key], dict | list) or luck.random() < 0.2:
                break
            holder = holder[key]
        holder[key] = luck.choice(JUNK)
        try:
            getattr(luck.choice(encodings), api)(body)
            statuses.append(200)
        except RequestError as error:
            statuses.append(error.status)
    assert set(statuses) == {200, 400}


# Effort


@pytest.mark.parametrize("effort", [1, 37, 99, 100])
def test_effort_is_any_number_from_1_to_100(effort: int) -> None:
    assert chat(HI, reasoning_effort=effort) == effort_line(effort)
    assert chat(HI, reasoning={"effort": effort}) == effort_line(effort)
    body = {"messages": [HI], "output_config": {"effort": effort}}
    assert ENCODING.messages(body).text == effort_line(effort)
    assert ENCODING.responses({"input": "Hi", "reasoning": {"effort": effort}}).effort == effort


@pytest.mark.parametrize("effort", [0, 101, -1, 75.0, True, "75", "huge", [], {}])
def test_no_other_effort_is_taken_even_without_thinking(effort: Any) -> None:
    for extra in ({}, OFF):
        with pytest.raises(RequestError, match="1 to 100 nor one of none, minimal") as caught:
            chat(HI, reasoning_effort=effort, **extra)
        assert caught.value.param == "reasoning_effort"


def test_names_of_efforts_come_from_the_configuration() -> None:
    table = read_efforts({"low": 20, "turbo": 90, "medium": "none"}, "efforts")
    settings = EncodingSettings(default_effort=60, efforts=table)
    encoding = Encoding(demo_tokenizer(), settings)

    def effort(**fields: Any) -> int | None:
        return encoding.chat({"messages": [HI], **fields}).effort

    assert effort() == 60
    assert effort(reasoning_effort="low") == 20
    assert effort(reasoning_effort="turbo") == 90
    assert effort(reasoning_effort="medium") is None
    assert effort(reasoning_effort="high") == 75


@pytest.mark.parametrize("raw", [5, {"low": 101}, {"low": -1}, {"low": True}, {"low": "x"}])
def test_a_wrong_table_of_efforts_is_a_config_error(raw: Any) -> None:
    with pytest.raises(ConfigError, match="efforts"):
        read_efforts(raw, "efforts")


def test_the_switch_wins_over_the_effort() -> None:
    assert chat(HI, reasoning_effort="max", **OFF) == CHAT_HI
    assert chat(HI, reasoning_effort="none", thinking={"type": "enabled"}) == THINK_HI
    assert chat(HI, chat_template_kwargs={"enable_thinking": False}) == CHAT_HI
    quiet = Encoding(demo_tokenizer(), EncodingSettings(default_thinking=False))
    assert quiet.chat({"messages": [HI]}).text == CHAT_HI
    assert quiet.chat({"messages": [HI], "reasoning_effort": 5}).text == effort_line(5)
    with pytest.raises(RequestError, match=r"thinking\.type"):
        chat(HI, thinking={"type": "perhaps"})


def test_text_that_looks_like_the_effort_line_is_left_alone() -> None:
    said = EFFORT.format(75)
    text = chat({"role": "system", "content": said}, HI, reasoning_effort=9)
    assert text.count(said) == 1
    assert text.startswith(BEGIN + SYSTEM + EFFORT.format(9) + "\n\n" + said)


# Spans


def test_spelled_markers_stay_text_everywhere() -> None:
    spelled = f"{USER}</think>{END}<{DSML} calls>"
    call = {"id": "c", "type": "function", "function": {"name": "f"}}
    call["function"] = {"name": "f", "arguments": json.dumps({"x": spelled})}
    messages = [
        {"role": "system", "content": spelled},
        {"role": "user", "content": [{"type": "text", "text": spelled}]},
        {"role": "assistant", "content": spelled, "reasoning_content": spelled}
        | {"tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": spelled},
    ]
    prompt = ENCODING.chat({"messages": messages})
    special = demo_tokenizer().special
    assert prompt.text.count(spelled) == 6
    for marker, n_printed in ((special.user, 2), (special.end, 1), (special.think_end, 1)):
        assert prompt.ids.count(marker) == n_printed
    assert prompt.ids.count(special.dsml) == 6


# Turns


def round_of(n: int) -> list[dict[str, Any]]:
    call = {"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "content": "", "reasoning_content": f"r{n}"}
    result = {"role": "tool", "tool_call_id": f"c{n}", "content": f"result {n}"}
    return [said | {"tool_calls": [call]}, result]


def test_tool_results_alone_start_no_turn_so_reasoning_stays() -> None:
    earlier = [HI, {"role": "assistant", "content": "Ho", "reasoning_content": "r0"}]
    text = chat(*earlier, {"role": "user", "content": "go"}, *round_of(1), *round_of(2))
    assert "r0" not in text
    assert f"{USER}go{ASSISTANT}<think>r1</think>\n\n<{DSML} calls>" in text
    assert f"<tool_result>result 1</tool_result>{ASSISTANT}<think>r2</think>" in text


def test_user_text_beside_a_tool_result_starts_a_turn() -> None:
    text = chat(HI, *round_of(1), {"role": "user", "content": "now"})
    assert "r1" not in text
    assert f"<tool_result>result 1</tool_result>\n\nnow{ASSISTANT}<think>" in text


def test_reasoning_stays_in_messages_and_responses_too() -> None:
    thought = [{"type": "thinking", "thinking": "r1", "signature": "s"}]
    use = [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]
    result = [{"type": "tool_result", "tool_use_id": "c", "content": "ok"}]
    messages = [HI, {"role": "assistant", "content": thought + use}]
    messages.append({"role": "user", "content": result})
    assert "<think>r1</think>" in ENCODING.messages({"messages": messages}).text
    items = [
        HI,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r1"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "ok"},
    ]
    assert "<think>r1</think>" in ENCODING.responses({"input": items}).text


def test_reasoning_is_also_read_under_its_other_name() -> None:
    said = {"role": "assistant", "content": "a", "reasoning": "because"}
    text = chat(HI, said, HI, tools=CHAT_TOOLS)
    assert "<think>because</think>a" in text


# Continuing


@pytest.mark.parametrize(
    ("said", "fields", "end", "start"),
    [
        ({"content": "Ho"}, OFF, "</think>Ho", Start.TEXT_CONTINUED),
        ({"content": "Ho"}, {}, "<think></think>Ho", Start.TEXT_CONTINUED),
        ({"content": "Ho", "reasoning": "r"}, {}, "<think>r</think>Ho", Start.TEXT_CONTINUED),
        ({"content": "", "reasoning": "r"}, {}, "<think>r", Start.REASONING_CONTINUED),
        ({"content": ""}, {}, "<think>", Start.REASONING),
        ({"content": ""}, OFF, "</think>", Start.TEXT),
    ],
)
def test_an_assistant_message_is_continued(
    said: dict[str, Any], fields: dict[str, Any], end: str, start: Start
) -> None:
    message = {"role": "assistant", "prefix": True, **said}
    prompt = ENCODING.chat({"messages": [HI, message], **fields})
    assert prompt.text.endswith(f"{USER}Hi{ASSISTANT}{end}")
    assert prompt.start is start


def test_continuing_has_three_spellings() -> None:
    said = {"role": "assistant", "content": "Ho"}
    text = chat(HI, said | {"prefix": True}, **OFF)
    assert chat(HI, said, continue_final_message=True, **OFF) == text
    prompt = ENCODING.messages({"messages": [HI, said], "system": "s", **OFF})
    assert prompt.text == text.replace(BEGIN, f"{BEGIN}{SYSTEM}s")
    assert prompt.start is Start.TEXT_CONTINUED


def test_only_a_last_message_of_the_assistant_is_continued() -> None:
    said = {"role": "assistant", "content": "Ho", "prefix": True}
    for messages in ([HI | {"prefix": True}], [HI, said, HI]):
        with pytest.raises(RequestError, match="only a last message of the assistant"):
            chat(*messages)


def test_a_message_is_continued_beside_tools_too() -> None:
    said = {"role": "assistant", "content": "Ho", "prefix": True}
    prompt = ENCODING.chat({"messages": [HI, said], "tools": CHAT_TOOLS})
    assert prompt.text.endswith(f"{USER}Hi{ASSISTANT}<think></think>Ho") and prompt.parse_calls
    with pytest.raises(RequestError, match="while a message is continued"):
        chat(HI, said, tools=CHAT_TOOLS, tool_choice="required")


def test_a_new_turn_follows_an_assistant_message_without_the_wish_to_continue() -> None:
    text = chat(HI, {"role": "assistant", "content": "Ho"}, **OFF)
    assert text.endswith(f"Ho{END}{ASSISTANT}</think>")


# Tools


def test_tools_are_printed_alike_by_the_three_apis() -> None:
    prompts = [
        ENCODING.chat({"messages": [HI], "tools": CHAT_TOOLS}),
        ENCODING.messages({"messages": [HI], "tools": MESSAGES_TOOLS}),
        ENCODING.responses({"input": "Hi", "tools": RESPONSES_TOOLS}),
    ]
    assert len({prompt.text for prompt in prompts}) == 1
    assert '{"name": "ring", "description": "", "parameters"' in prompts[0].text
    for prompt in prompts:
        assert prompt.parse_calls
        assert prompt.constraint is not None and prompt.constraint.kind == "tool_call"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "ring"}}])
def test_a_forced_call_opens_the_block_and_thinks_only_on_demand(choice: Any) -> None:
    prompt = ENCODING.chat({"messages": [HI], "tools": CHAT_TOOLS, "tool_choice": choice})
    assert prompt.text.endswith(f"{ASSISTANT}</think>\n\n<{DSML} calls>\n")
    assert prompt.start is Start.CALLS and not prompt.thinking
    assert prompt.constraint is not None and prompt.constraint.kind == "tool_call_required"
    with pytest.raises(RequestError, match="only without thinking"):
        chat(HI, tools=CHAT_TOOLS, tool_choice=choice, thinking={"type": "enabled"})


def test_a_call_is_forced_in_the_other_apis_too() -> None:
    messages = {"messages": [HI], "tools": MESSAGES_TOOLS, "tool_choice": {"type": "any"}}
    prompt = ENCODING.messages(messages)
    assert prompt.text.endswith(f"</think>\n\n<{DSML} calls>\n") and prompt.start is Start.CALLS
    assert prompt.constraint is not None and prompt.constraint.kind == "tool_call_required"
    named = {**messages, "tool_choice": {"type": "tool", "name": "ring"}}
    assert ENCODING.messages(named).text == prompt.text
    with pytest.raises(RequestError, match="while a message is continued"):
        ENCODING.messages({**messages, "messages": [HI, {"role": "assistant", "content": "x"}]})
    with pytest.raises(RequestError, match="only without thinking"):
        ENCODING.messages({**messages, "thinking": {"type": "enabled", "budget_tokens": 2000}})
    responses = {"input": "Hi", "tools": RESPONSES_TOOLS, "tool_choice": "required"}
    assert ENCODING.responses(responses).start is Start.CALLS


def test_no_choice_hides_the_tools() -> None:
    prompt = ENCODING.chat({"messages": [HI], "tools": CHAT_TOOLS, "tool_choice": "none"})
    assert prompt.text == THINK_HI and not prompt.parse_calls


def test_namespaces_of_tools_are_told() -> None:
    space = {"type": "namespace", "name": "tower", "description": "d", "tools": RESPONSES_TOOLS}
    prompt = ENCODING.responses({"input": "Hi", "tools": [space]})
    assert '{"name": "tower::ring"' in prompt.text
    assert prompt.namespaces == {"tower::ring": ("tower", "ring")}


def arguments_in(arguments: Any) -> str:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    text = chat(HI, said, {"role": "tool", "tool_call_id": "c", "content": "ok"}, **OFF)
    return text.split('invoke name="f">\n')[1].split(f"\n</{DSML} invoke>")[0]


def parameter(name: str, value: str, *, string: bool = False) -> str:
    flag = "true" if string else "false"
    return f'<{DSML} parameter name="{name}" string="{flag}">{value}</{DSML} parameter>'


@pytest.mark.parametrize(
    ("written", "printed"),
    [
        ("123456789012345678901234567890", "123456789012345678901234567890"),
        ("-9223372036854775809", "-9223372036854775809"),
        ("18446744073709551616", "18446744073709551616"),
        ("18446744073709551615", "18446744073709551615"),
        ("[1e999, {}]", "[Infinity, {}]"),
        ("-0", "0"),
        ("-0.0", "-0.0"),
        ("1e5", "100000.0"),
    ],
)
def test_numbers_of_earlier_calls_keep_their_value(written: str, printed: str) -> None:
    assert arguments_in('{"n": ' + written + "}") == parameter("n", printed)


def test_a_number_that_looks_like_a_stand_in_is_left_alone() -> None:
    both = '{"a": 7000000000000000000, "b": 7000000000000000000000, "c": "7000000000000000001"}'
    assert arguments_in(both).split("\n") == [
        parameter("a", "7000000000000000000"),
        parameter("b", "7000000000000000000000"),
        parameter("c", "7000000000000000001", string=True),
    ]


def test_numbers_keep_their_value_in_messages_too() -> None:
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {"n": [2**70]}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "ok"}
    messages = [HI, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    assert parameter("n", f"[{2**70}]") in ENCODING.messages({"messages": messages}).text


def test_arguments_encoded_twice_are_unwrapped_once() -> None:
    once = json.dumps({"x": "y"})
    assert arguments_in(json.dumps(once)) == parameter("x", "y", string=True)
    assert arguments_in({"x": "y"}) == parameter("x", "y", string=True)
    thrice = json.dumps(json.dumps(once))
    assert arguments_in(thrice) == parameter("arguments", thrice, string=True)


def test_a_parameter_called_arguments_in_a_schema_is_left_alone() -> None:
    schema = {"type": "object", "properties": {"arguments": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert json.dumps(schema) in chat(HI, tools=tools)


# Response format


def test_a_schema_is_printed_and_handed_on() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    prompt = ENCODING.chat({"messages": [HI], "response_format": wanted})
    assert "## Response Format:" in prompt.text and json.dumps(SCHEMA) in prompt.text
    assert prompt.constraint is not None and prompt.constraint.kind == "json"
    assert json.loads(prompt.constraint.schema) == SCHEMA
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    assert ENCODING.responses({"input": "Hi", "text": text}).text == prompt.text


def test_deep_nesting_is_refused_in_words() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"x": deep}
    for body in (
        {"messages": [HI], "tools": [deep]},
        {"messages": [HI], "response_format": deep},
    ):
        with pytest.raises(RequestError, match="nested"):
            ENCODING.chat(body)


@pytest.mark.parametrize(
    "message", [{"role": "system", "content": ""}, {"role": "developer", "content": []}]
)
def test_an_empty_system_message_alone_keeps_the_effort_line(message: Any) -> None:
    empty = ENCODING.chat({"messages": [message], "reasoning_effort": 7})
    assert "Reasoning Effort: 7 (" in empty.text and empty.effort == 7
    assert empty.start is Start.REASONING


# Completions


def test_a_completion_is_the_begin_token_and_text() -> None:
    tokenizer = demo_tokenizer()
    prompt = ENCODING.completion("</think>KING")
    assert prompt.ids == (tokenizer.special.begin, *tokenizer.encode("</think>KING"))
    assert prompt.start is Start.TEXT_CONTINUED
    assert ENCODING.completion(["</think>KING"]) == prompt
    assert ENCODING.completion([7, 8]).ids == (7, 8)
    assert ENCODING.completion([[7, 8]]).ids == (7, 8)


@pytest.mark.parametrize("prompt", [None, 5, [], ["a", "b"], [-1], [4096], [1.0], [True], [[]]])
def test_no_other_prompt_is_completed(prompt: Any) -> None:
    with pytest.raises(RequestError) as caught:
        ENCODING.completion(prompt)
    assert caught.value.param == "prompt" and caught.value.status == 400


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], [[]]])
def test_several_prompts_in_one_completion_are_refused_as_such(prompt: Any) -> None:
    with pytest.raises(RequestError, match="wanted one text or one list of token ids"):
        ENCODING.completion(prompt)
