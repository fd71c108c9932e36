"""The vendor's library on V4 prompts, as far as requests can say them: it is fit for those too.

The server itself reads V4.1 models alone; a V4 model is refused by its type.
"""

from __future__ import annotations

import json
from typing import Any

import deepseek_recipe as library
import pytest

from tests.support.encoding_cases import golden

CASES = {case["name"]: case for case in golden("v4_prompts.json")}
OPTIONS = library.ConversionOptions().with_model_alias("m", library.ModelVersion.DeepseekV4Pro)


def rendered(case: dict[str, Any]) -> str:
    """The library's prompt; ValueError or ConversionError where it refuses."""
    options = case["options"]
    body: dict[str, Any] = {
        "model": "m",
        "messages": [
            {("prefix" if key == "wo_eos" else key): value for key, value in message.items()}
            for message in case["messages"]
        ],
        "thinking": {"type": "disabled" if options.get("mode") == "chat" else "enabled"},
    }
    if case["tools"]:
        body["tools"] = case["tools"]
    # The encoder's own default prints no text, which the library calls low; a server's is high.
    body["reasoning_effort"] = options.get("reasoning_effort", "low")
    if "response_format" in options:
        schema = {"name": "answer", "schema": options["response_format"]}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    found = library.ChatCompletionRequest(json.dumps(body)).convert(OPTIONS).conversation
    prompt: str = library.DeepseekV4Encoding().render_conversation(found).prompt
    return prompt


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case["library"] == "same"])
def test_it_renders_the_references_prompt(name: str) -> None:
    assert rendered(CASES[name]) == CASES[name]["prompt"]


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if "prompt" in case["library"]])
def test_where_it_parts_from_the_reference_it_is_as_known(name: str) -> None:
    assert rendered(CASES[name]) == CASES[name]["library"]["prompt"]


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if "refuses" in case["library"]])
def test_what_requests_may_not_say_is_refused(name: str) -> None:
    with pytest.raises((ValueError, library.ConversionError)):
        rendered(CASES[name])
