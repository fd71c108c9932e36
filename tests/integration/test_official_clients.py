"""The official Python clients against `headrace serve` on the demo model."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.support.serving import Serving, serving

DEMO = Path(__file__).resolve().parents[2] / "demo"
USER: list[Any] = [{"role": "user", "content": "Who goes there? Answer in json."}]
NO_THINKING: Any = {"type": "disabled"}
PARAMETERS = {
    "type": "object",
    "properties": {
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["celsius", "kelvin"]},
    },
    "required": ["days", "unit"],
}


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    directory = Path(tempfile.mkdtemp(prefix="hr-", dir="/tmp"))
    with serving(directory, "--precision", "unrounded", "--max-waiting", "8") as served:
        yield served
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def chat(served: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(served: Serving) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="any", max_retries=0) as client:
        yield client


def test_a_greedy_completion_is_the_expected_text_streamed_or_not(chat: openai.OpenAI) -> None:
    samples = json.loads((DEMO / "expected.json").read_text())["samples"]
    sample = next(sample for sample in samples if sample["name"] == "play")
    ids = sample["unrounded"]["continuation_ids"][:12]
    wish: Any = {"model": "demo", "prompt": sample["prompt_ids"], "max_tokens": 12}
    whole = chat.completions.create(**wish, temperature=0, logprobs=1)
    parts = list(chat.completions.create(**wish, temperature=0, stream=True))
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(ids)
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == whole.choices[0].text
    top = [max(places, key=lambda name: places[name]) for places in logprobs.top_logprobs or []]
    assert top == logprobs.tokens


def test_a_chat_answers_the_same_to_the_same_seed(chat: openai.OpenAI) -> None:
    def ask(seed: int) -> str | None:
        answer = chat.chat.completions.create(
            model="demo", messages=USER, seed=seed, max_completion_tokens=8, temperature=1
        )
        message = answer.choices[0].message
        return message.content or getattr(message, "reasoning_content", None)

    assert ask(5) == ask(5)
    assert ask(5) != ask(6)


def test_a_chat_stream_gives_the_text_of_the_whole_answer(chat: openai.OpenAI) -> None:
    wish: Any = {"model": "demo", "messages": USER, "max_tokens": 10, "temperature": 0}
    wish["reasoning_effort"] = "none"
    whole = chat.chat.completions.create(**wish)
    chunks = list(
        chat.chat.completions.create(**wish, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_reasoning_streams_beside_the_content(chat: openai.OpenAI) -> None:
    stream = chat.chat.completions.create(
        model="demo", messages=USER, max_tokens=8, temperature=0, stream=True
    )
    deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    assert any(getattr(delta, "reasoning_content", None) for delta in deltas)
    assert not any("<" in (delta.content or "") for delta in deltas)


class Guard(BaseModel):
    name: str
    armed: bool


def test_a_schema_given_as_a_class_comes_back_as_one(chat: openai.OpenAI) -> None:
    answer = chat.chat.completions.parse(
        model="demo",
        messages=USER,
        response_format=Guard,
        max_tokens=200,
        seed=3,
        temperature=0.7,
        reasoning_effort="none",
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Guard)


def test_a_call_that_is_demanded_comes_with_arguments_of_the_schema(chat: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
    answer = chat.chat.completions.create(
        model="demo",
        messages=USER,
        tools=[tool],
        tool_choice="required",
        max_tokens=200,
        seed=2,
        extra_body={"reasoning_effort": "none"},
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    for call in choice.message.tool_calls or []:
        assert call.type == "function"
        given = json.loads(call.function.arguments)
        assert call.function.name == "weather"
        assert 1 <= given["days"] <= 9
        assert given["unit"] in ("celsius", "kelvin")


def _is_of_the_schema(given: Any) -> bool:
    return 1 <= given["days"] <= 9 and given["unit"] in ("celsius", "kelvin")


def test_a_demanded_call_streams_its_arguments(chat: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
    chunks = chat.chat.completions.create(
        model="demo",
        messages=USER,
        tools=[tool],
        tool_choice="required",
        max_tokens=200,
        seed=2,
        stream=True,
        extra_body={"reasoning_effort": "none"},
    )
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    deltas = [
        call for choice in choices for call in choice.delta.tool_calls or [] if not call.index
    ]
    parts = [call.function for call in deltas if call.function]
    assert [part.name for part in parts if part.name] == ["weather"]
    assert _is_of_the_schema(json.loads("".join(part.arguments or "" for part in parts)))
    assert choices[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_that_must_call_holds_a_block_of_the_call(
    claude: anthropic.Anthropic, stream: bool
) -> None:
    wish: Any = {"model": "demo", "messages": USER, "max_tokens": 200, "thinking": NO_THINKING}
    wish["tools"] = [{"name": "weather", "input_schema": PARAMETERS}]
    wish["tool_choice"] = {"type": "any"}
    wish["extra_body"] = {"seed": 2}
    if stream:
        with claude.messages.stream(**wish) as events:
            message = events.get_final_message()
    else:
        message = claude.messages.create(**wish)
    assert message.stop_reason == "tool_use"
    calls = [block for block in message.content if block.type == "tool_use"]
    assert calls
    assert all(_is_of_the_schema(call.input) for call in calls)


def test_a_response_that_must_call_streams_the_call(chat: openai.OpenAI) -> None:
    wish: Any = {"model": "demo", "input": "Who goes there?", "reasoning": {"effort": "none"}}
    wish["tools"] = [
        {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
    ]
    with chat.responses.stream(
        **wish, tool_choice="required", max_output_tokens=200, extra_body={"seed": 2}
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    assert kinds[-1] == "response.completed"
    calls = [item for item in final.output if item.type == "function_call"]
    assert calls
    assert all(_is_of_the_schema(json.loads(call.arguments)) for call in calls)


def test_stop_strings_and_log_probabilities_reach_the_clients(
    chat: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    wish: Any = {"model": "demo", "messages": USER, "max_tokens": 12, "temperature": 0}
    wish["extra_body"] = {"reasoning_effort": "none"}
    whole = chat.chat.completions.create(**wish, logprobs=True, top_logprobs=3).choices[0]
    text = whole.message.content or ""
    assert whole.logprobs is not None
    places = whole.logprobs.content or []
    assert "".join(place.token for place in places) == text
    assert all(len(place.top_logprobs) == 3 for place in places)
    stop = text[4:8]
    stopped = chat.chat.completions.create(**wish, stop=[stop])
    assert stopped.choices[0].message.content == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    message = claude.messages.create(
        model="demo",
        max_tokens=12,
        messages=USER,
        thinking=NO_THINKING,
        stop_sequences=[stop],
        extra_body={"temperature": 0},
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_json_mode_gives_an_object_even_when_cut_it_is_one_so_far(chat: openai.OpenAI) -> None:
    answer = chat.chat.completions.create(
        model="demo",
        messages=USER,
        response_format={"type": "json_object"},
        max_tokens=12,
        seed=1,
        extra_body={"reasoning_effort": "none"},
    )
    assert (answer.choices[0].message.content or "").startswith("{")


def test_the_responses_api_answers_and_streams(chat: openai.OpenAI) -> None:
    wish: Any = {"model": "demo", "input": "Who goes there?", "max_output_tokens": 8}
    wish |= {"temperature": 0, "reasoning": {"effort": "none"}}
    whole = chat.responses.create(**wish)
    assert whole.status == "incomplete"
    assert whole.usage is not None
    assert whole.usage.output_tokens == 8
    with chat.responses.stream(**wish) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
    assert text == whole.output_text


def test_the_models_are_listed(chat: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    assert [model.id for model in chat.models.list()] == ["demo"]
    assert chat.models.retrieve("demo").owned_by == "headrace"
    assert [model.id for model in claude.models.list()] == ["demo"]
    with pytest.raises(openai.NotFoundError):
        chat.models.retrieve("other")


def test_errors_are_the_clients_own_exceptions(
    chat: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    with pytest.raises(openai.BadRequestError) as asked_twice:
        chat.chat.completions.create(model="demo", messages=USER, n=2)
    assert asked_twice.value.param == "n"
    with pytest.raises(openai.BadRequestError) as too_long:
        chat.completions.create(model="demo", prompt=[5] * 5000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(model="demo", max_tokens=0, messages=USER)


def test_a_message_is_answered_streamed_and_counted(claude: anthropic.Anthropic) -> None:
    wish: Any = {"model": "demo", "messages": USER, "max_tokens": 8, "thinking": NO_THINKING}
    wish["extra_body"] = {"temperature": 0}
    whole = claude.messages.create(**wish)
    assert whole.stop_reason == "max_tokens"
    assert whole.content[0].type == "text"
    with claude.messages.stream(**wish) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    found = [(block.type, getattr(block, "text", None)) for block in final.content]
    assert found == [("text", text)]
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 8)
    counted = claude.messages.count_tokens(model="demo", messages=USER, thinking=NO_THINKING)
    assert counted.input_tokens == whole.usage.input_tokens


def test_thinking_comes_as_a_block_of_its_own(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(
        model="demo",
        max_tokens=8,
        messages=USER,
        thinking={"type": "enabled", "budget_tokens": 1024},
        extra_body={"temperature": 0},
    )
    assert whole.content[0].type == "thinking"
    assert whole.content[0].thinking


def test_many_at_once_are_answered_in_turn_with_what_each_alone_would_get(
    served: Serving,
) -> None:
    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        parts = await client.completions.create(
            model="demo", prompt="My lords,", seed=seed, max_tokens=6, stream=True
        )
        return "".join([part.choices[0].text async for part in parts])

    async def all_at_once() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any") as client:
            together = await asyncio.gather(*(ask(client, seed) for seed in range(5)))
            return together, [await ask(client, seed) for seed in range(5)]

    together, alone = asyncio.run(all_at_once())
    assert together == alone
