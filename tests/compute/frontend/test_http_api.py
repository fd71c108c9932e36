"""What each API answers, whole and as a stream, to an output that the test wrote."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from compute.frontend.tokenizer import Tokenizer
from protocol.files.checkpoint import open_checkpoint
from tests.support.running_frontend import Reply, RunningFrontend, running_frontend
from tests.support.scripted_compute import ScriptedCompute, scripted_compute

DEMO = Path(__file__).resolve().parents[3] / "demo"
USER = [{"role": "user", "content": "Say it in json."}]
CHAT = {"messages": USER, "reasoning_effort": "none"}
MESSAGES = {"messages": USER, "max_tokens": 200, "thinking": {"type": "disabled"}}
RESPONSE = {"input": "Say it.", "reasoning": {"effort": "none"}}
TOOL: dict[str, Any] = {
    "name": "get_weather",
    "description": "tells the weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
CHAT_TOOLS = [{"type": "function", "function": TOOL}]
END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
CALL = (
    "Let me look.\n\n<\uff5cDSML\uff5ctool_calls>\n"
    '<\uff5cDSML\uff5cinvoke name="get_weather">\n'
    '<\uff5cDSML\uff5cparameter name="city" string="true">Oslo</\uff5cDSML\uff5cparameter>\n'
    '<\uff5cDSML\uff5cparameter name="days" string="false">3</\uff5cDSML\uff5cparameter>\n'
    "</\uff5cDSML\uff5cinvoke>\n</\uff5cDSML\uff5ctool_calls>"
)
ARGUMENTS = {"city": "Oslo", "days": 3}


@dataclass
class World:
    compute: ScriptedCompute
    web: RunningFrontend
    tokenizer: Tokenizer

    def says(self, text: str) -> None:
        self.compute.says = self.tokenizer.encode(text, markers=True)

    def ask(self, path: str, body: dict[str, Any]) -> Reply:
        reply = self.web.ask(path, body)
        assert reply.status == 200, reply.body
        return reply


@pytest.fixture(scope="module")
def shared() -> Iterator[World]:
    directory = Path(tempfile.mkdtemp(prefix="hr-", dir="/tmp"))
    fingerprint = open_checkpoint(DEMO).fingerprint
    with (
        scripted_compute(directory, fingerprint=fingerprint) as compute,
        running_frontend(directory) as web,
    ):
        web.joined()
        yield World(compute, web, Tokenizer.load(DEMO))
    shutil.rmtree(directory)


@pytest.fixture
def world(shared: World) -> World:
    shared.compute.error = None
    shared.compute.jobs.clear()
    return shared


def _joined(chunks: list[Any], name: str) -> str:
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(delta.get(name) or "" for delta in deltas)


# Chat Completions


def test_a_chat_answer_has_text_usage_and_a_reason(world: World) -> None:
    world.says("Hello, world." + END)
    answer = world.ask("/v1/chat/completions", CHAT).json
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello, world.", "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    usage = answer["usage"]
    n_new = len(world.compute.says)
    assert usage["completion_tokens"] == n_new
    assert usage["total_tokens"] == usage["prompt_tokens"] + n_new
    assert usage["prompt_tokens"] == len(world.compute.jobs[0].prompt_ids)
    assert usage["headrace"] == {
        "hits": 6 * n_new,
        "hits_by_tier": {"arena": 6 * n_new},
        "misses": 2,
        "bytes_read": 100,
        "stall_ms": 0.5,
        "copy_ms": 0.25,
        "queue_ms": 1.0,
        "prefill_ms": 10.0,
        "decode_ms": 10.0,
        "prefill_tokens_per_second": 100 * usage["prompt_tokens"],
        "decode_tokens_per_second": 100 * (n_new - 1),
    }


def test_a_chat_stream_has_one_head_deltas_a_reason_usage_and_done(world: World) -> None:
    world.says("Hello, world." + END)
    body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    reply = world.ask("/v1/chat/completions", body)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, last = [data for _, data in reply.events]
    assert last == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert _joined(chunks, "content") == "Hello, world."
    reasons = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(world.compute.says)


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_stands_apart_from_the_text(world: World, stream: bool) -> None:
    world.says("First this.</think>\n\nThen that." + END)
    reply = world.ask("/v1/chat/completions", {"messages": USER, "stream": stream})
    if stream:
        chunks = [data for _, data in reply.events][:-1]
        said = {name: _joined(chunks, name) for name in ("content", "reasoning_content")}
    else:
        said = reply.json["choices"][0]["message"]
        details = reply.json["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] == len(world.tokenizer.encode("First this.")) + 1
    assert (said["reasoning_content"], said["content"]) == ("First this.", "Then that.")


def test_a_tool_call_comes_whole_with_arguments_that_are_json(world: World) -> None:
    world.says(CALL + END)
    choice = world.ask("/v1/chat/completions", CHAT | {"tools": CHAT_TOOLS}).json["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me look."
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "get_weather")
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS


def test_a_tool_call_streams_its_name_then_its_arguments(world: World) -> None:
    world.says(CALL + END)
    body = CHAT | {"tools": CHAT_TOOLS, "stream": True}
    chunks = [data for _, data in world.ask("/v1/chat/completions", body).events][:-1]
    calls = [
        call
        for chunk in chunks
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls", [])
    ]
    head, *more = calls
    assert head["id"].startswith("call_")
    assert (head["index"], head["function"]) == (0, {"name": "get_weather", "arguments": ""})
    assert json.loads("".join(call["function"]["arguments"] for call in more)) == ARGUMENTS
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_cover_every_token_of_the_text(world: World, stream: bool) -> None:
    world.says("One two." + END)
    body = CHAT | {"logprobs": True, "top_logprobs": 2, "stream": stream}
    reply = world.ask("/v1/chat/completions", body)
    if stream:
        choices = [c for _, data in reply.events[:-1] for c in data["choices"]]
        entries = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
    else:
        entries = reply.json["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == "One two."
    assert bytes(b for entry in entries for b in entry["bytes"]) == b"One two."
    for entry in entries:
        assert entry["logprob"] == -0.5
        assert [top["logprob"] for top in entry["top_logprobs"]] == [-1.0, -2.0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(world: World, stream: bool) -> None:
    world.says("One, two, three, four." + END)
    reply = world.ask("/v1/chat/completions", CHAT | {"stop": ["thr", "zzz"], "stream": stream})
    if stream:
        chunks = [data for _, data in reply.events][:-1]
        text, reason = _joined(chunks, "content"), chunks[-1]["choices"][0]["finish_reason"]
    else:
        choice = reply.json["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert (text, reason) == ("One, two, ", "stop")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_token_limit_cuts_and_says_length(world: World, name: str) -> None:
    world.says("One, two, three." + END)
    choice = world.ask("/v1/chat/completions", CHAT | {name: 3}).json["choices"][0]
    assert choice["finish_reason"] == "length"
    assert "One, two, three.".startswith(choice["message"]["content"])
    assert world.compute.jobs[0].wishes.max_tokens == 3


def test_the_draw_reaches_compute_as_asked(world: World) -> None:
    world.says(END)
    body = CHAT | {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "seed": -1,
        "frequency_penalty": 1,
        "presence_penalty": 0.5,
        "logit_bias": {"77": -3},
    }
    world.ask("/v1/chat/completions", body)
    wishes = world.compute.jobs[0].wishes
    sampling = wishes.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 7)
    assert (sampling.min_p, sampling.seed) == (0.125, 2**63 - 1)
    assert (wishes.frequency, wishes.presence, wishes.bias) == (1.0, 0.5, {77: -3.0})
    assert world.tokenizer.special.end in wishes.stop_ids


def test_without_a_seed_every_request_draws_anew(world: World) -> None:
    world.says(END)
    for _ in range(2):
        world.ask("/v1/chat/completions", CHAT)
    first, second = world.compute.jobs
    assert first.wishes.sampling.seed != second.wishes.sampling.seed


@pytest.mark.parametrize("thinks", [False, True])
def test_a_json_schema_becomes_a_grammar_behind_the_reasoning(world: World, thinks: bool) -> None:
    world.says(("</think>" if thinks else "") + '{"n": 5}' + END)
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    body = {"messages": USER, "response_format": form}
    body |= {} if thinks else {"reasoning_effort": "none"}
    world.ask("/v1/chat/completions", body)
    wishes = world.compute.jobs[0].wishes
    assert json.loads(wishes.grammar)["grammars"][0]["json_schema"]["required"] == ["n"]
    assert wishes.grammar_after == (world.tokenizer.special.think_end if thinks else None)


def test_strict_tools_become_a_grammar_behind_the_marker(world: World) -> None:
    world.says("None." + END)
    strict = TOOL | {"strict": True}
    strict["parameters"] = TOOL["parameters"] | {
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    world.ask("/v1/chat/completions", CHAT | {"tools": [{"type": "function", "function": strict}]})
    wishes = world.compute.jobs[0].wishes
    assert 'name=\\"city\\"' in wishes.grammar
    assert wishes.grammar_after == world.tokenizer.special.dsml


# Completions


def test_a_completion_is_one_text_with_markers_unread(world: World) -> None:
    world.says(" to be.</think> Or not." + END)
    answer = world.ask("/v1/completions", {"prompt": "I want", "max_tokens": 50}).json
    assert answer["object"] == "text_completion"
    choice = answer["choices"][0]
    assert choice == {
        "index": 0,
        "text": " to be. Or not.",
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert world.compute.jobs[0].prompt_ids[0] == world.tokenizer.special.begin


def test_a_completion_of_ids_streams_and_has_sixteen_tokens_by_default(world: World) -> None:
    world.compute.says = [300 + n for n in range(40)]
    body = {"prompt": [0, 5, 6], "stream": True, "stream_options": {"include_usage": True}}
    *parts, last = [data for _, data in world.ask("/v1/completions", body).events]
    assert last == "[DONE]"
    assert world.compute.jobs[0].prompt_ids == (0, 5, 6)
    text = "".join(choice["text"] for part in parts for choice in part["choices"])
    assert text == world.tokenizer.decode(world.compute.says[:16])
    assert parts[-2]["choices"][0]["finish_reason"] == "length"
    assert parts[-1]["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_give_offsets_into_the_text(world: World, stream: bool) -> None:
    world.says("One two three" + END)
    reply = world.ask("/v1/completions", {"prompt": "x", "logprobs": 1, "stream": stream})
    if stream:
        parts = [c["logprobs"] for _, data in reply.events[:-1] for c in data["choices"]]
        found = {
            name: [item for part in parts if part for item in part[name]]
            for name in ("tokens", "text_offset", "token_logprobs")
        }
    else:
        found = reply.json["choices"][0]["logprobs"]
    assert "".join(found["tokens"]) == "One two three"
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert "One two three".startswith(token, offset)
    assert set(found["token_logprobs"]) == {-0.5}


# Messages


def test_a_message_has_blocks_a_stop_reason_and_usage(world: World) -> None:
    world.says("First this.</think>Then that." + END)
    body = MESSAGES | {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    answer = world.ask("/v1/messages", body).json
    assert (answer["type"], answer["role"]) == ("message", "assistant")
    assert answer["content"] == [
        {"type": "thinking", "thinking": "First this.", "signature": "headrace"},
        {"type": "text", "text": "Then that."},
    ]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    assert answer["usage"]["input_tokens"] == len(world.compute.jobs[0].prompt_ids)
    assert answer["usage"]["output_tokens"] == len(world.compute.says)


def test_a_message_streams_its_events_in_the_apis_order(world: World) -> None:
    world.says("First this.</think>" + CALL + END)
    tools = [{"name": "get_weather", "input_schema": TOOL["parameters"]}]
    body = MESSAGES | {"thinking": {"type": "enabled"}, "tools": tools, "stream": True}
    events = world.ask("/v1/messages", body).events
    assert all(name == data["type"] for name, data in events)
    names = [name for name, _ in events]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-2:] == ["message_delta", "message_stop"]
    starts = [data for name, data in events if name == "content_block_start"]
    assert [start["content_block"]["type"] for start in starts] == ["thinking", "text", "tool_use"]
    assert [start["index"] for start in starts] == [0, 1, 2]
    blocks: dict[int, str] = {}
    for name, data in events:
        if name == "content_block_delta":
            delta = data["delta"]
            text = delta.get("thinking") or delta.get("text") or delta.get("partial_json") or ""
            blocks[data["index"]] = blocks.get(data["index"], "") + text
    assert (blocks[0], blocks[1]) == ("First this.", "Let me look.")
    assert json.loads(blocks[2]) == ARGUMENTS
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2][1]["usage"]["output_tokens"] == len(world.compute.says)


def test_a_message_names_the_stop_sequence_that_ended_it(world: World) -> None:
    world.says("One, two, three." + END)
    answer = world.ask("/v1/messages", MESSAGES | {"stop_sequences": [", t"]}).json
    assert answer["content"] == [{"type": "text", "text": "One"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", ", t")


def test_tokens_are_counted_as_the_prompt_has_them(world: World) -> None:
    world.says(END)
    body = {"messages": USER, "thinking": {"type": "disabled"}}
    counted = world.ask("/v1/messages/count_tokens", body).json
    world.ask("/v1/messages", MESSAGES)
    assert counted == {"input_tokens": len(world.compute.jobs[0].prompt_ids)}


# Responses


def test_a_response_has_items_status_and_usage(world: World) -> None:
    world.says("First this.</think>" + CALL + END)
    tools = [{"type": "function", **TOOL}]
    answer = world.ask("/v1/responses", {"input": "Say it.", "tools": tools}).json
    assert (answer["object"], answer["status"]) == ("response", "completed")
    reasoning, message, call = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "First this."}]
    assert message["content"][0]["text"] == "Let me look."
    assert (call["type"], call["name"]) == ("function_call", "get_weather")
    assert json.loads(call["arguments"]) == ARGUMENTS
    assert answer["usage"]["output_tokens"] == len(world.compute.says)


def test_a_response_streams_numbered_events_that_frame_each_item(world: World) -> None:
    world.says("First this.</think>Then that." + END)
    events = world.ask("/v1/responses", {"input": "Say it.", "stream": True}).events
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert all(name == data["type"] for name, data in events)
    names = [name.removeprefix("response.") for name, _ in events]
    frame = [name for name in names if not name.endswith(".delta")]
    assert frame == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.done"),
        *("content_part.done", "output_item.done", "completed"),
    ]
    deltas = [data["delta"] for name, data in events if name == "response.output_text.delta"]
    assert "".join(deltas) == "Then that."
    whole = events[-1][1]["response"]
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]
    assert whole["output"][1]["content"][0]["text"] == "Then that."


def test_a_response_that_was_cut_is_incomplete(world: World) -> None:
    world.says("One, two, three." + END)
    body = RESPONSE | {"max_output_tokens": 2, "stream": True}
    name, last = world.ask("/v1/responses", body).events[-1]
    assert name == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"


def test_response_logprobs_come_when_they_are_included(world: World) -> None:
    world.says("One two." + END)
    body = RESPONSE | {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    part = world.ask("/v1/responses", body).json["output"][0]["content"][0]
    assert "".join(entry["token"] for entry in part["logprobs"]) == "One two."


# errors in the middle


@pytest.mark.parametrize(("fault", "status"), [("request", 400), ("shard", 500), ("daemon", 503)])
def test_a_generation_that_fails_says_why_in_each_apis_shape(
    world: World, fault: str, status: int
) -> None:
    world.compute.says = []
    world.compute.error = (fault, "layer 3 expert 5: EIO")
    reply = world.web.ask("/v1/chat/completions", CHAT)
    assert reply.status == status
    assert reply.json["error"]["message"] == "layer 3 expert 5: EIO"
    assert ("retry-after" in reply.headers) == (status == 503)
    reply = world.web.ask("/v1/messages", MESSAGES)
    assert (reply.status, reply.json["type"]) == (status, "error")
    assert "EIO" in reply.json["error"]["message"]


def test_a_stream_that_fails_ends_with_an_error_event(world: World) -> None:
    world.says("One")
    world.compute.error = ("shard", "layer 3 expert 5: EIO")
    events = world.ask("/v1/chat/completions", CHAT | {"stream": True}).events
    assert events[-1][1] == "[DONE]"
    assert events[-2][1]["error"]["message"] == "layer 3 expert 5: EIO"
    name, data = world.ask("/v1/messages", MESSAGES | {"stream": True}).events[-1]
    assert (name, data["error"]["type"]) == ("error", "api_error")
    events = world.ask("/v1/responses", RESPONSE | {"stream": True}).events
    assert [name for name, _ in events[-2:]] == ["error", "response.failed"]
    assert events[-1][1]["response"]["error"]["message"] == "layer 3 expert 5: EIO"


# what is not generated


def test_the_models_are_listed_for_both_companies_clients(world: World) -> None:
    listed = world.web.ask("/v1/models").json
    assert (listed["object"], listed["has_more"]) == ("list", False)
    assert (listed["data"][0]["id"], listed["data"][0]["type"]) == ("demo", "model")
    assert world.web.ask("/v1/models/demo").json == listed["data"][0]
    reply = world.web.ask("/v1/models/other")
    assert (reply.status, reply.json["error"]["code"]) == (404, "model_not_found")


def test_health_ready_and_metrics(world: World) -> None:
    assert world.web.ask("/health").json == {"status": "ok"}
    ready = world.web.ask("/ready").json
    assert (ready["status"], ready["compute"]["state"]) == ("ready", "scripted")
    metrics = world.web.ask("/metrics").body.decode()
    assert "headrace_compute_joined 1.0" in metrics
    assert 'headrace_tokens_total{kind="new"}' in metrics
    assert 'headrace_request_seconds_count{part="stall"}' in metrics
