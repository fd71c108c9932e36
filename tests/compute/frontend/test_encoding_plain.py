"""Without the recipe library, and for models without the markers."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from compute.frontend.encoding import Encoding, RequestError, Start
from protocol.errors import ConfigError
from tests.support.encoding_cases import (
    ASSISTANT,
    DSML,
    ROOT,
    USER,
    answer_of,
    demo_tokenizer,
    special_ranges,
    tokenizer_without,
)

HI = {"role": "user", "content": "Hi"}
TOOLS = [{"type": "function", "function": {"name": "ring", "parameters": {"type": "object"}}}]
SYSTEM_TURN = {"role": "system", "content": "Be brief."}
HO = {"role": "assistant", "content": "Ho", "reasoning_content": "hm"}
TALKS: list[list[dict[str, Any]]] = [
    [HI],
    [SYSTEM_TURN, HI],
    [HI, HO, HI],
    [HI, HO],
    [HO, HI],
    [HI, HI, HO, HI, HI],
    [HI, HO, SYSTEM_TURN],
    [SYSTEM_TURN, SYSTEM_TURN, HI, HO, HO],
    [HI, HO | {"prefix": True}],
    [HI, HO | {"prefix": True, "content": ""}],
    [HI, {"role": "assistant", "content": "", "prefix": True}],
    [SYSTEM_TURN],
    [{"role": "developer", "content": "Be brief."}, HI],
    [{"role": "user", "content": [{"type": "text", "text": "a</think>"}] * 2}],
]
KINDS: list[dict[str, Any]] = [
    {},
    {"thinking": {"type": "disabled"}},
    {"reasoning_effort": "low"},
    {"reasoning_effort": 7},
]


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package cannot be imported."""
    monkeypatch.setitem(sys.modules, "deepseek_recipe", None)
    monkeypatch.delitem(sys.modules, "compute.frontend.encoding.recipe", raising=False)


@pytest.fixture
def bare(hidden: None) -> Encoding:
    return Encoding(demo_tokenizer())


@pytest.mark.parametrize("fields", KINDS)
@pytest.mark.parametrize("talk", TALKS)
def test_plain_talk_is_the_same_without_the_package(
    talk: list[dict[str, Any]], fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"messages": talk, **fields}
    whole = Encoding(demo_tokenizer()).chat(body)
    monkeypatch.setitem(sys.modules, "deepseek_recipe", None)
    monkeypatch.delitem(sys.modules, "compute.frontend.encoding.recipe")
    plain = Encoding(demo_tokenizer()).chat(body)
    assert plain.text == whole.text
    assert special_ranges(plain) == special_ranges(whole)
    assert plain == whole


def test_the_other_apis_work_without_the_package(bare: Encoding) -> None:
    chat = bare.chat({"messages": [SYSTEM_TURN, HI, HO]})
    thought = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Ho"}]
    said = [HI, {"role": "assistant", "content": thought}]
    turned = bare.messages({"system": "Be brief.", "messages": [*said, HI]})
    assert turned == bare.chat({"messages": [SYSTEM_TURN, HI, HO, HI]})
    assert bare.messages({"messages": said}).start is Start.TEXT_CONTINUED
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    items = [HI, reasoning, {"type": "message", "role": "assistant", "content": "Ho"}]
    assert bare.responses({"instructions": "Be brief.", "input": items}) == chat
    assert bare.responses({"input": "Hi"}) == bare.chat({"messages": [HI]})
    assert bare.completion("Hi").ids[1:] == tuple(demo_tokenizer().encode("Hi"))


def test_it_is_said_once_what_is_missing(bare: Encoding) -> None:
    assert bare.missing is not None
    assert "no tools" in bare.missing and "deepseek-recipe" in bare.missing
    assert "pip install '.[serve]' in the clone" in bare.missing
    assert Encoding(tokenizer_without(DSML)).missing == (
        "no tools: the model's tokenizer lacks the DSML marker"
    )


def test_nothing_is_missing_with_the_package() -> None:
    assert Encoding(demo_tokenizer()).missing is None


CALL = {"id": "c", "type": "function", "function": {"name": "ring", "arguments": "{}"}}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [HI], "tools": TOOLS},
        {"messages": [HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
        {"messages": [HI, {"role": "tool", "tool_call_id": "c", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    ],
)
def test_what_needs_the_package_is_refused_with_its_name(
    bare: Encoding, body: dict[str, Any]
) -> None:
    with pytest.raises(RequestError, match="deepseek-recipe") as caught:
        bare.chat(body)
    assert caught.value.status == 400


def test_tools_that_may_not_be_called_are_no_matter(bare: Encoding) -> None:
    body = {"messages": [HI], "tools": TOOLS, "tool_choice": "none"}
    assert bare.chat(body) == bare.chat({"messages": [HI]})


@pytest.mark.parametrize("content", [None, 5, [5], [{"type": "text"}], {"type": "text"}])
def test_content_that_is_no_text_is_refused(bare: Encoding, content: Any) -> None:
    with pytest.raises(RequestError):
        bare.chat({"messages": [{"role": "user", "content": content}]})


def test_a_schema_is_handed_on_without_the_package(bare: Encoding) -> None:
    schema = {"type": "object"}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    found = bare.chat({"messages": [HI], "response_format": wanted}).constraint
    assert found is not None and json.loads(found.schema) == schema
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    assert bare.responses({"input": "Hi", "text": text}).constraint == found
    found = bare.chat({"messages": [HI], "response_format": {"type": "json_object"}}).constraint
    assert found is not None and (found.kind, found.schema) == ("json", "")
    assert bare.chat({"messages": [HI], "response_format": {"type": "text"}}).constraint is None
    with pytest.raises(RequestError, match="none of text, json_object, json_schema"):
        bare.chat({"messages": [HI], "response_format": {"type": "xml"}})


def test_a_model_without_markers_gets_names() -> None:
    encoding = Encoding(tokenizer_without())
    prompt = encoding.chat({"messages": [SYSTEM_TURN, HI, HO, HI]})
    assert prompt.text == (
        "System: Be brief.\n\nUser: Hi\n\nAssistant: Ho\n\nUser: Hi\n\nAssistant:"
    )
    assert not prompt.thinking and prompt.start is Start.TEXT
    parser = encoding.parser(prompt)
    answer = encoding.tokenizer.encode(" Ho.\n\nUser: More")
    events = [*parser.feed(answer), *parser.finish()]
    assert [getattr(event, "text", None) for event in events] == [" Ho.", None]
    assert encoding.missing is not None and "begin, end, user" in encoding.missing
    assert encoding.completion("Hi").ids == tuple(encoding.tokenizer.encode("Hi"))
    with pytest.raises(RequestError, match="--chat-template"):
        encoding.chat({"messages": [HI], "tools": TOOLS})


def test_a_model_without_markers_continues() -> None:
    prompt = Encoding(tokenizer_without()).messages({"messages": [HI, HO]})
    assert prompt.text == "User: Hi\n\nAssistant: Ho"
    assert prompt.start is Start.TEXT_CONTINUED


def test_a_marker_that_the_model_lacks_is_named() -> None:
    reminder = "<\uff5clatest_reminder\uff5c>"
    encoding = Encoding(tokenizer_without(reminder))
    body = {"messages": [{"role": "latest_reminder", "content": "noon"}, HI]}
    with pytest.raises(RequestError, match="has no marker <\uff5clatest_reminder"):
        encoding.chat(body)


def test_a_template_needs_jinja2(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "compute.frontend.encoding.template_chat", raising=False)
    with pytest.raises(ConfigError, match="--chat-template needs jinja2"):
        Encoding(demo_tokenizer(), template=tmp_path / "x.jinja")


def test_the_demos_own_sample_is_what_a_request_for_it_becomes() -> None:
    samples = json.loads((ROOT / "demo" / "expected.json").read_text())["samples"]
    sample = next(sample for sample in samples if sample["name"] == "chat")
    said = sample["prompt_text"].split(USER)[1].split(ASSISTANT)[0]
    encoding = Encoding(demo_tokenizer())
    body = {"messages": [{"role": "user", "content": said}], "thinking": {"type": "disabled"}}
    prompt = encoding.chat(body)
    assert list(prompt.ids) == sample["prompt_ids"]
    parser = encoding.parser(prompt)
    ids = sample["vendor"]["continuation_ids"]
    answer = answer_of([*parser.feed(ids), *parser.finish(cut=True)])
    assert answer.text == demo_tokenizer().decode(ids) and answer.finish == "length"


def test_a_text_that_is_surely_too_long_is_not_tokenised(
    bare: Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = bare.tokenizer
    body = {"messages": [{"role": "user", "content": "ring " * 20_000}]}
    least = tokenizer.fewest_ids(body["messages"][0]["content"])
    n = len(bare.chat(body).ids)
    assert 100 < least < n
    assert len(bare.chat(body, n + 1).ids) == n
    assert len(bare.chat(body, least + 40).ids) == n  # too long, but that is not sure yet
    monkeypatch.setattr(tokenizer, "encode", None)
    for make in (bare.chat, bare.messages):
        with pytest.raises(RequestError, match=rf"at least {least + 4} tokens; .* of 100") as found:
            make(body | {"thinking": {"type": "disabled"}}, 100)
        assert found.value.code == "context_length_exceeded"
    with pytest.raises(RequestError, match=rf"at least {least + 1} tokens; .* of {least + 1}"):
        bare.completion(body["messages"][0]["content"], least + 1)
