"""Every golden output, the repairs, and the edges of the grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest

from compute.frontend.encoding import OutputParser, Start
from tests.support.encoding_cases import (
    DSML,
    END,
    Answer,
    demo_tokenizer,
    golden,
    marked,
    read,
    tokenizer_without,
)

TEXT_CASES = {case["name"]: case for case in golden("outputs.json")}
TOKEN_CASES = {case["name"]: case for case in golden("token_outputs.json")}
STARTS = {
    "inside the call block": Start.CALLS,
    "inside reasoning, continued": Start.REASONING_CONTINUED,
    "in the answer, continued": Start.TEXT_CONTINUED,
}
# The vendor's stream parser lets these markers through; here none shows.
NO_MARKER_SHOWS: dict[str, dict[str, str]] = {
    "think_start_repeated": {"reasoning": "a", "content": "b"},
    "think_start_in_content": {"reasoning": "a", "content": "bc"},
    "eos_in_middle": {"content": "before"},
    "user_token_in_content": {"content": "xy"},
    "bos_in_content": {"content": "xy"},
    "image_marker_in_content": {"content": "see "},
    "think_start_token_first": {"reasoning": "a", "content": "b"},
    "marker_token_in_content": {"content": "a  b"},
    "eos_token_then_text": {"content": "a"},
}
# The three repairs: arguments are always a JSON object, names stay whole, names are unique.
REPAIRED_ARGUMENTS: dict[str, dict[str, Any]] = {
    "non_string_not_json": {"x": "maybe"},
    "non_string_empty": {"x": ""},
    "non_string_nan": {"x": "NaN"},
    "string_flag_missing": {"x": 3},
    "string_flag_other": {"x": 3},
    "string_flag_uppercase": {"x": "3"},
    "parameter_name_special": {"a>b": "1", "c d": "2", "é": "3"},
    "parameter_name_quote": {'a"b': "1"},
    "parameter_duplicate": {"x": "2"},
}


def start_of(case: dict[str, Any]) -> Start:
    usual = Start.REASONING if case["mode"] == "thinking" else Start.TEXT
    return STARTS[case["start"]] if "start" in case else usual


def ids_of(case: dict[str, Any]) -> list[int]:
    tokenizer = demo_tokenizer()
    if "text" in case:
        return marked(case["text"])
    ids: list[int] = []
    for piece in case["pieces"]:
        spelled = piece.get("token")
        ids += tokenizer.encode(spelled or piece["text"], markers=spelled is not None)
    return ids


def expected(case: dict[str, Any]) -> dict[str, Any]:
    name, result = case["name"], dict(case["result"])
    result |= NO_MARKER_SHOWS.get(name, {})
    if name in REPAIRED_ARGUMENTS:
        (call,) = result["tool_calls"]
        arguments = json.dumps(REPAIRED_ARGUMENTS[name], ensure_ascii=False)
        result["tool_calls"] = [call | {"arguments": arguments}]
    return result


@pytest.mark.parametrize(
    "case", [*TEXT_CASES.values(), *TOKEN_CASES.values()], ids=lambda c: c["name"]
)
def test_output_is_read_as_the_vendor_reads_it_but_for_the_repairs(case: dict[str, Any]) -> None:
    answer = read(ids_of(case), start_of(case), cut=case["end"] == "length")
    assert answer.as_golden() == expected(case)


def test_every_deviation_is_one() -> None:
    for name in (*NO_MARKER_SHOWS, *REPAIRED_ARGUMENTS):
        case = TEXT_CASES.get(name) or TOKEN_CASES[name]
        assert expected(case) != case["result"]


def tag(name: str, *, end: bool = False) -> str:
    return f"<{'/' if end else ''}{DSML} {name}>"


def value(name: str, text: str, *, string: bool = True) -> str:
    flag = "true" if string else "false"
    head = tag(f'parameter name="{name}" string="{flag}"')
    return head + text + tag("parameter", end=True) + "\n"


def call(name: str, *values: str) -> str:
    return tag(f'invoke name="{name}"') + "\n" + "".join(values) + tag("invoke", end=True) + "\n"


def block(*calls: str) -> str:
    return "\n\n" + tag("calls") + "\n" + "".join(calls) + tag("calls", end=True)


def read_text(text: str, start: Start = Start.TEXT, **options: Any) -> Answer:
    return read(marked(text), start, **options)


# Calls


def test_several_calls_are_numbered_in_order() -> None:
    answer = read_text("go" + block(call("f", value("a", "1")), call("g"), call("f")) + END)
    assert [(c.name, c.arguments) for c in answer.calls] == [
        ("f", '{"a": "1"}'),
        ("g", "{}"),
        ("f", "{}"),
    ]
    assert answer.text == "go" and answer.finish == "tool_calls"


def test_values_that_are_no_strings_keep_their_json() -> None:
    values = {
        "nested": '{"a": [1, {"b": [null, true, "</x>"]}], "c": {}}',
        "number": "-12.50e3",
        "big": "123456789012345678901234567890",
        "boolean": "false",
        "none": "null",
        "list": "[ 1,\n 2 ]",
    }
    written = "".join(value(name, text, string=False) for name, text in values.items())
    (only,) = read_text(block(call("f", written))).calls
    body = ", ".join(f'"{name}": {text}' for name, text in values.items())
    assert only.arguments == only.streamed == "{" + body + "}"
    json.loads(only.arguments)


@pytest.mark.parametrize(
    "text", ["Infinity", "-Infinity", "nan", "01", "1.", "{'a': 1}", "[1,]", ""]
)
def test_a_value_that_is_no_json_becomes_a_string(text: str) -> None:
    (only,) = read_text(block(call("f", value("x", text, string=False)))).calls
    assert json.loads(only.arguments) == {"x": text}
    assert only.streamed == only.arguments


def test_a_value_nested_too_deeply_to_check_becomes_a_string() -> None:
    (only,) = read_text(block(call("f", value("x", "[" * 100_000, string=False)))).calls
    assert json.loads(only.arguments) == {"x": "[" * 100_000}


@pytest.mark.parametrize("name", ["c d", 'a"b', "a>b", "\\", "a\nb", "é漢", "</x>", "", 'x" y="z'])
def test_a_name_stays_whole_and_is_escaped(name: str) -> None:
    (only,) = read_text(block(call("f", value(name, "v")))).calls
    assert json.loads(only.arguments) == {name: "v"}


def test_of_a_name_that_comes_twice_the_last_value_counts() -> None:
    values = [value("x", "1"), value("y", "2", string=False), value("x", "[3]", string=False)]
    (only,) = read_text(block(call("f", *values))).calls
    assert only.arguments == '{"x": [3], "y": 2}'
    assert json.loads(only.streamed) == json.loads(only.arguments)


def test_strings_stream_while_they_are_written() -> None:
    parser = OutputParser(demo_tokenizer())
    parser.feed(marked("\n\n" + tag("calls") + tag('invoke name="f"')))
    events = parser.feed(marked(tag('parameter name="x" string="true"') + 'a "b'))
    assert "".join(getattr(event, "text", "") for event in events) == '{"x": "a \\"b'


def test_an_end_tag_that_is_only_spelled_is_part_of_the_value() -> None:
    tokenizer = demo_tokenizer()
    spelled = f"a</{DSML} parameter>\n</{DSML} invoke>\n</{DSML} calls>{END}</think>"
    head = marked("\n\n" + tag("calls") + tag('invoke name="f"'))
    head += marked(tag('parameter name="x" string="true"'))
    tail = marked(tag("parameter", end=True) + tag("invoke", end=True) + tag("calls", end=True))
    (only,) = read(head + tokenizer.encode(spelled) + tail).calls
    assert json.loads(only.arguments) == {"x": spelled}


def test_a_call_ends_where_the_next_begins() -> None:
    text = "\n\n" + tag("calls") + tag('invoke name="f"') + value("a", "1") + call("g")
    answer = read_text(text + tag("calls", end=True))
    assert [(c.name, c.arguments, c.complete) for c in answer.calls] == [
        ("f", '{"a": "1"}', True),
        ("g", "{}", True),
    ]


@pytest.mark.parametrize("cut", [False, True])
def test_a_call_that_is_cut_anywhere_is_incomplete_and_no_json(cut: bool) -> None:
    ids = marked(block(call("f", value("s", 'a"\\b'), value("n", "[1, 2]", string=False))))
    whole = read(ids).calls[0]
    n_complete = 0
    for n_ids in range(len(ids)):
        answer = read(ids[:n_ids], cut=cut)
        assert answer.finish == ("length" if cut else "tool_calls" if answer.calls else "stop")
        for part in answer.calls:
            if part.complete:
                assert part.arguments == whole.arguments
                n_complete += 1
                continue
            assert part.arguments == part.streamed
            with pytest.raises(ValueError, match=r"Expecting|Unterminated|Extra"):
                json.loads(part.arguments)
    assert 0 < n_complete < len(ids) // 2


def test_a_limit_after_the_end_is_no_cut() -> None:
    assert read_text("a" + END, cut=True).finish == "stop"
    assert read_text("a STOP b", stops=["STOP"], cut=True).finish == "stop"


# Reasoning


def test_a_call_inside_reasoning_ends_it() -> None:
    answer = read_text("let me" + block(call("f")) + "</think>done", Start.REASONING)
    assert (answer.reasoning, answer.text) == ("let me", "")
    assert [c.name for c in answer.calls] == ["f"] and answer.finish == "tool_calls"


def test_reasoning_that_never_ends_is_all_there_is() -> None:
    answer = read_text("on and on\n\n", Start.REASONING, cut=True)
    assert answer == Answer(reasoning="on and on\n\n", finish="length")


def test_a_think_marker_that_comes_first_opens_reasoning() -> None:
    answer = read_text("\n<think>\nhm\n</think>\n\nyes", Start.TEXT)
    assert (answer.reasoning, answer.text) == ("hm", "yes")
    assert read_text("<think>hm</think>yes", Start.TEXT_CONTINUED).text == "hmyes"


# Nothing of a marker in the text


def test_calls_that_the_request_does_not_allow_are_kept_from_it() -> None:
    answer = read_text("Sure." + block(call("f", value("a", "1"))), parse_calls=False)
    assert answer == Answer(text="Sure.", finish="stop")


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (f"a</{DSML} calls>b", "ab"),
        (f"a\n</{DSML} invoke>\nb", "a\n\nb"),
        (f"a</{DSML}parameter >b", "ab"),
        (f"a</{DSML} 1 + 1 > 0", "a 1 + 1 > 0"),
        (f"a</{DSML}</think>b", "ab"),
        (f"a</{DSML} cal", "a"),
        (f"a{DSML}b", "ab"),
        (f"a<</{DSML} calls>b", "a<b"),
        (f"a <{DSML} b", "a "),
        ("a<</think>b", "a<b"),
    ],
)
def test_stray_markup_does_not_show(written: str, shown: str) -> None:
    assert read_text(written).text == shown


def test_a_tokenizer_without_markers_shows_everything() -> None:
    tokenizer = tokenizer_without()
    text = f"a</think>b<{DSML} calls>{END}c"
    parser = OutputParser(tokenizer)
    events = [*parser.feed(tokenizer.encode(text, markers=True)), *parser.finish()]
    assert "".join(getattr(event, "text", "") for event in events) == text


# Stop strings


def test_a_stop_string_ends_the_text() -> None:
    answer = read_text("one STOP two", stops=["STOP"])
    assert answer == Answer(text="one ", finish="stop", stop="STOP")
    parser = OutputParser(demo_tokenizer(), stops=["STOP"])
    parser.feed(marked("one STOP"))
    assert parser.stopped


def test_stop_strings_are_not_looked_for_in_reasoning_and_calls() -> None:
    text = "STOP</think>a" + block(call("f", value("x", "STOP")))
    answer = read_text(text, Start.REASONING, stops=["STOP"])
    assert answer.reasoning == "STOP" and answer.finish == "tool_calls"
    assert answer.calls[0].arguments == '{"x": "STOP"}'


def test_what_might_have_become_a_stop_string_is_shown_before_a_call() -> None:
    answer = read_text("a ST" + block(call("f")), stops=["STOP"])
    assert answer.text == "a ST" and answer.stop is None


def test_nothing_is_read_after_the_end() -> None:
    parser = OutputParser(demo_tokenizer())
    parser.feed(marked("a" + END))
    assert parser.stopped and parser.feed(marked("b")) == []
