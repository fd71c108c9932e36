"""A server on a platform that the vendor's recipe library does not know: plain talk still works."""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from compute.frontend.tokenizer import Tokenizer
from protocol.files.checkpoint import open_checkpoint
from tests.support.running_frontend import running_frontend
from tests.support.scripted_compute import scripted_compute

DEMO = Path(__file__).resolve().parents[3] / "demo"
USER = [{"role": "user", "content": "Say it."}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def test_it_starts_says_what_is_missing_and_serves_the_rest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "deepseek_recipe", None)
    monkeypatch.delitem(sys.modules, "compute.frontend.encoding.recipe", raising=False)
    directory = Path(tempfile.mkdtemp(prefix="hr-", dir="/tmp"))
    with (
        caplog.at_level(logging.INFO, "headrace.frontend"),
        scripted_compute(directory, fingerprint=open_checkpoint(DEMO).fingerprint) as compute,
        running_frontend(directory) as web,
    ):
        web.joined()
        compute.says = Tokenizer.load(DEMO).encode("So be it.")
        chat = {"messages": USER, "max_tokens": 9, "reasoning_effort": "none"}
        bodies = {
            "/v1/chat/completions": chat,
            "/v1/completions": {"prompt": "Say it.", "max_tokens": 9},
            "/v1/responses": {"input": "Say it.", "reasoning": {"effort": "none"}},
            "/v1/messages": {
                "messages": USER,
                "max_tokens": 9,
                "thinking": {"type": "disabled"},
            },
        }
        for path, body in bodies.items():
            reply = web.ask(path, body)
            assert reply.status == 200, reply.body
            assert b"So be it." in reply.body
        reply = web.ask("/v1/chat/completions", chat | {"tools": [TOOL]})
        assert reply.status == 400
        assert "the package deepseek-recipe cannot be imported" in reply.json["error"]["message"]
    shutil.rmtree(directory)
    assert [line for line in caplog.messages if "no tools" in line and "deepseek-recipe" in line]
