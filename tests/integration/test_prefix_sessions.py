"""`headrace serve` reports what it took over from earlier requests, and finds it after a kill."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.running_frontend import eventually
from tests.support.serving import Serving, serving

PROMPT = "The king sat in his hall, and all his men with him. " * 8


@pytest.fixture
def directory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="hr"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def complete(served: Serving, prompt: str) -> tuple[str, dict[str, Any]]:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    reply = served.ask("/v1/completions", body)
    assert reply.status == 200, reply.body
    answer = reply.json
    return answer["choices"][0]["text"], answer["usage"]


def cached(usage: dict[str, Any]) -> int:
    found: int = usage["prompt_tokens_details"]["cached_tokens"]
    return found


@pytest.mark.timeout(120)
def test_a_session_goes_on_after_compute_was_killed(directory: Path) -> None:
    sessions = directory / "sessions"
    with serving(
        directory, *("--chunk", "32", "--session-dir", str(sessions), "--precision", "unrounded")
    ) as served:
        text, usage = complete(served, PROMPT)
        n_prompt = usage["prompt_tokens"]
        assert cached(usage) == 0
        assert complete(served, PROMPT)[0] == text
        whole = (n_prompt - 1) // 32 * 32
        eventually(lambda: len(list(sessions.glob("*/*.front"))) == n_prompt // 32 + 2)
        served.kill("compute")
        eventually(lambda: served.ask("/ready").status == 200, 60)
        again, usage = complete(served, PROMPT)
        assert again == text
        assert cached(usage) == whole
        _, usage = complete(served, PROMPT + text)
        assert cached(usage) >= whole
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
