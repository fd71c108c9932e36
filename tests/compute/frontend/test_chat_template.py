"""Prompts by `--chat-template`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compute.frontend.encoding import Encoding, RequestError, Start
from protocol.errors import ConfigError
from tests.support.encoding_cases import (
    ASSISTANT,
    BEGIN,
    END,
    SYSTEM,
    USER,
    demo_tokenizer,
    special_ranges,
    tokenizer_without,
)

HI = {"role": "user", "content": "Hi"}
HO = {"role": "assistant", "content": "Ho"}
TEMPLATE = """\
{{ bos_token }}
{%- if tools %}{{ '<\uff5cSystem\uff5c>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{%- endif %}
{%- for message in messages %}
  {%- if message.role == 'user' %}{{ '<\uff5cUser\uff5c>' + message.content }}
  {%- elif message.role == 'system' %}{{ '<\uff5cSystem\uff5c>' + message.content }}
  {%- elif message.role == 'tool' %}{{ '[' + message.content + ']' }}
  {%- elif message.tool_calls %}
    {%- for call in message.tool_calls %}
      {{- call.function.name }}{% for k, v in call.function.arguments | items %}{{ k, v }}
      {%- endfor %}
    {%- endfor %}
  {%- elif loop.last and not add_generation_prompt %}
    {{- '<\uff5cAssistant\uff5c></think>' + message.content }}
  {%- else %}{{ '<\uff5cAssistant\uff5c></think>' + message.content + eos_token }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<\uff5cAssistant\uff5c>' + ('<think>' if thinking else '</think>') }}
{%- endif %}
"""


def encoding_of(template: str, folder: Path, *markers: str) -> Encoding:
    path = folder / "chat.jinja"
    path.write_text(template)
    tokenizer = tokenizer_without(*markers) if markers else demo_tokenizer()
    return Encoding(tokenizer, template=path)


@pytest.fixture
def encoding(tmp_path: Path) -> Encoding:
    return encoding_of(TEMPLATE, tmp_path)


def test_the_template_makes_the_prompt(encoding: Encoding) -> None:
    prompt = encoding.chat({"messages": [{"role": "system", "content": "s"}, HI, HO, HI]})
    assert prompt.text == (
        f"{BEGIN}{SYSTEM}s{USER}Hi{ASSISTANT}</think>Ho{END}{USER}Hi{ASSISTANT}<think>"
    )
    assert prompt.start is Start.REASONING and prompt.effort == 75
    off = {"messages": [HI], "thinking": {"type": "disabled"}}
    assert encoding.chat(off).start is Start.TEXT
    assert encoding.missing is None


def test_all_three_apis_go_through_the_template(encoding: Encoding) -> None:
    chat = encoding.chat({"messages": [{"role": "system", "content": "s"}, HI]})
    assert encoding.messages({"system": "s", "messages": [HI]}) == chat
    assert encoding.responses({"instructions": "s", "input": "Hi"}) == chat


def test_markers_of_the_template_are_ids_and_spelled_ones_stay_text(encoding: Encoding) -> None:
    spelled = f"a</think>{USER}<think>{END}b"
    prompt = encoding.chat({"messages": [{"role": "user", "content": spelled}]})
    assert prompt.text == f"{BEGIN}{USER}{spelled}{ASSISTANT}<think>"
    ranges = special_ranges(prompt)
    assert [prompt.text[a:b] for a, b in ranges] == [BEGIN, USER, ASSISTANT, "<think>"]
    special = demo_tokenizer().special
    assert prompt.ids.count(special.user) == 1 and special.think_end not in prompt.ids


def test_rare_characters_of_the_request_survive(encoding: Encoding) -> None:
    said = "\ua490<think>\ua491"
    prompt = encoding.chat({"messages": [{"role": "user", "content": said}]})
    assert said in prompt.text
    every = "".join(map(chr, range(0xA490, 0xA4C7)))
    with pytest.raises(RequestError, match="Yi radicals"):
        encoding.chat({"messages": [{"role": "user", "content": every}]})


def test_an_assistant_message_is_continued(encoding: Encoding) -> None:
    prompt = encoding.chat({"messages": [HI, HO | {"prefix": True}]})
    assert prompt.text == f"{BEGIN}{USER}Hi{ASSISTANT}</think>Ho"
    assert prompt.start is Start.TEXT_CONTINUED
    assert encoding.messages({"messages": [HI, HO]}) == prompt


def test_tools_and_calls_of_chat_completions_reach_the_template(encoding: Encoding) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "<think>"}}]
    function = {"name": "f", "arguments": '{"x": "</think>"}'}
    call = {"id": "c", "type": "function", "function": function}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "ok"}
    prompt = encoding.chat({"messages": [HI, said, result], "tools": tools})
    assert '"description": "<think>"' in prompt.text
    assert "f('x', '</think>')[ok]" in prompt.text
    assert prompt.parse_calls
    special = demo_tokenizer().special
    assert prompt.ids.count(special.think) == 1 and special.think_end not in prompt.ids
    with pytest.raises(RequestError, match="only Chat Completions requests take tools"):
        encoding.messages({"messages": [HI], "tools": [{"name": "f", "input_schema": {}}]})


def test_more_names_come_from_the_request(tmp_path: Path) -> None:
    encoding = encoding_of("{{ style }} {{ messages[0].content }}", tmp_path)
    body = {"messages": [HI], "chat_template_kwargs": {"style": "loud", "messages": []}}
    assert encoding.chat(body).text == "loud Hi"


def test_a_model_without_markers_can_have_a_template(tmp_path: Path) -> None:
    markers = (BEGIN, END, USER, ASSISTANT, "<think>", "</think>")
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    encoding = encoding_of(template, tmp_path, *markers)
    prompt = encoding.chat({"messages": [HI, HO, HI]})
    assert prompt.text == "[user]Hi[assistant]Ho[user]Hi[assistant]"
    assert prompt.ids == tuple(encoding.tokenizer.encode(prompt.text))
    assert prompt.start is Start.TEXT


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system role here') }}",
        "{{ messages[9].content }}",
        "{{ 1 // 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages | nothing_like_it if False }}{{ none.x.y }}",
    ],
)
def test_a_fault_of_the_template_is_the_requests_error(template: str, tmp_path: Path) -> None:
    try:
        encoding = encoding_of(template, tmp_path)
    except ConfigError:
        return
    with pytest.raises(RequestError, match=r"the chat template chat\.jinja refuses"):
        encoding.chat({"messages": [HI]})


@pytest.mark.parametrize("template", ["{% for %}", "{{", "{% include 'x' %}{% endfor %}"])
def test_a_file_that_is_no_template_is_a_config_error(template: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"chat\.jinja: not a chat template"):
        encoding_of(template, tmp_path)


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jinja"):
        Encoding(demo_tokenizer(), template=tmp_path / "none.jinja")


def test_the_template_may_ask_the_date_and_break_loops(tmp_path: Path) -> None:
    loop = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}x{% endfor %}"
    encoding = encoding_of("{{ strftime_now('%Y')[:2] }}" + loop, tmp_path)
    body: dict[str, Any] = {"messages": [HI, HO, HI]}
    assert encoding.chat(body).text == "20x"
