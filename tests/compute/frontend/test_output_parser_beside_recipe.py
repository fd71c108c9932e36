"""The output parser beside the vendor's own, on outputs as the model writes them and cuts of them.

The two differ only by the repairs, so names are plain and unique, values are JSON, and only the
DSML and think markers occur.
"""

from __future__ import annotations

import json
from typing import Any

import deepseek_recipe as library
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compute.frontend.encoding import Encoding, Start
from tests.support.encoding_cases import DSML, TOKENIZER, demo_tokenizer, golden, read

TOKENS = library.Tokenizer.from_file(str(TOKENIZER))
STAGES = {
    Start.TEXT: None,
    Start.CALLS: None,
    Start.REASONING: library.ThinkingInitialStage.ReasoningStart,
    Start.REASONING_CONTINUED: library.ThinkingInitialStage.ReasoningContinuation,
    Start.TEXT_CONTINUED: library.ThinkingInitialStage.ContentContinuation,
}


def vendor_reads(ids: list[int], start: Start, *, cut: bool) -> dict[str, Any]:
    request = library.ConversationRequest(
        library.Conversation([library.UserMessage("x")]), library.ModelVersion.DeepseekV41Flash
    )
    generator = library.ChatCompletionRequest.chunk_generator(request, "id", "model")
    options = library.ParsingOptions(
        starts_in_tool_calls=start is Start.CALLS, thinking_initial_stage=STAGES[start]
    )
    processor = library.StreamProcessor(generator, options, TOKENS)
    reason = library.InferenceFinishReason
    chunks = processor.push(library.InferenceChunk.ready())
    for token_id in ids:
        chunks += processor.push(library.InferenceChunk.tokens([token_id]))
    finish = library.InferenceChunk.finish(reason.Length if cut else reason.Stop)
    chunks += processor.push(finish) + processor.finish()
    found: dict[str, Any] = {"reasoning": "", "content": "", "tool_calls": [], "finish": None}
    for chunk in chunks:
        for choice in json.loads(chunk.to_json())["choices"]:
            delta = choice["delta"]
            found["reasoning"] += delta.get("reasoning_content") or ""
            found["content"] += delta.get("content") or ""
            found["finish"] = choice.get("finish_reason") or found["finish"]
            for call in delta.get("tool_calls") or []:
                if call["function"].get("name") is not None:
                    named = {"name": call["function"]["name"], "arguments": ""}
                    found["tool_calls"].append(named)
                found["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return found


words = st.lists(
    st.sampled_from(
        ["a", "b ", "\n", "\n\n", "<", "</", ">", '"', "\\", "é漢🧭", "name=", " </x>"]
    ),
    max_size=6,
).map("".join)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text('ab"\\é', max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner),
    max_leaves=5,
)
gaps = st.sampled_from(["\n", "", "\n  ", "\n\n"])


@st.composite
def parameters(draw: st.DrawFn, name: str) -> str:
    is_string = draw(st.booleans())
    value = draw(words) if is_string else json.dumps(draw(json_values), ensure_ascii=False)
    flag = "true" if is_string else "false"
    head = f'<{DSML} parameter name="{name}" string="{flag}">'
    return head + value + f"</{DSML} parameter>"


@st.composite
def calls(draw: st.DrawFn) -> str:
    names = draw(st.lists(st.sampled_from(["x", "y_1", "a>b", "é"]), max_size=3, unique=True))
    inside = "".join(draw(gaps) + draw(parameters(name)) for name in names)
    tool = draw(st.sampled_from(["f", "tide_table", "ns::g"]))
    return f'<{DSML} invoke name="{tool}">' + inside + draw(gaps) + f"</{DSML} invoke>"


@st.composite
def outputs(draw: st.DrawFn) -> tuple[Start, str]:
    start = draw(st.sampled_from([start for start in Start if start is not Start.CALLS]))
    text = draw(words)
    if start in (Start.REASONING, Start.REASONING_CONTINUED) and draw(st.booleans()):
        text += "</think>" + draw(words)
    if draw(st.booleans()):
        listed = draw(st.lists(calls(), min_size=1, max_size=3))
        inside = "".join(draw(gaps) + call for call in listed)
        # The vendor keeps a newline between a `<` of the text and a block.
        text += "." if text.rstrip("\n").endswith("<") else ""
        text += f"\n\n<{DSML} calls>" + inside + draw(gaps) + f"</{DSML} calls>" + draw(words)
    return start, text


@settings(max_examples=150, deadline=None, derandomize=True)
@given(outputs(), st.data())
def test_outputs_and_cuts_of_them_read_as_the_vendor_reads_them(
    output: tuple[Start, str], data: st.DataObject
) -> None:
    start, text = output
    ids = demo_tokenizer().encode(text, markers=True)
    assert read(ids, start).as_golden() == vendor_reads(ids, start, cut=False)
    n_ids = data.draw(st.integers(0, len(ids)))
    ours = without_half_characters(read(ids[:n_ids], start, cut=True).as_golden())
    theirs = vendor_reads(ids[:n_ids], start, cut=True)
    assert ours == theirs or only_a_name_is_late(ours, theirs)


def without_half_characters(found: dict[str, Any]) -> dict[str, Any]:
    """The vendor leaves out the character that a cut went through; here U+FFFD stands for it."""
    left: dict[str, Any] = json.loads(json.dumps(found).replace("\\ufffd", ""))
    return left


def only_a_name_is_late(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether the cut fell into a parameter's head, whose name the vendor had already sent."""
    if not ours["tool_calls"] or {**ours, "tool_calls": 0} != {**theirs, "tool_calls": 0}:
        return False
    *earlier, last = ours["tool_calls"]
    *their_earlier, their_last = theirs["tool_calls"]
    late = their_last["arguments"].removeprefix(last["arguments"])
    return earlier == their_earlier and late.startswith(("{", ", "))


@pytest.mark.parametrize("case", golden("requests.json"), ids=lambda case: case["name"])
def test_ids_of_a_prompt_are_the_vendors(case: dict[str, Any]) -> None:
    if "prompt" not in case or case["name"] == "effort_integer":
        pytest.skip("the vendor renders no prompt")
    version = library.ModelVersion.DeepseekV41Flash
    options = library.ConversionOptions().with_model_alias("m", version)
    body = json.dumps({"model": "m", **case["request"]})
    conversation = library.ChatCompletionRequest(body).convert(options).conversation
    ids = library.DeepseekV41Encoding().with_tokenizer(TOKENS).encode(conversation)
    assert list(Encoding(demo_tokenizer()).chat(case["request"]).ids) == ids
