"""The response object: what was asked, said back, and what came of it."""

from __future__ import annotations

import time
from typing import Any

from compute.frontend.answer import Answer
from compute.frontend.service import Frontend, new_id

from .fields import Fields
from .sampling import Draw
from .usage import responses_usage

_SAID_BACK = ("instructions", "metadata", "reasoning", "user", "prompt_cache_key", "service_tier")


class ResponseObject:
    """One response, at any time of its life."""

    def __init__(self, fields: Fields, frontend: Frontend, draw: Draw) -> None:
        self.id = new_id("resp_")
        body = fields.body
        self._base: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": frontend.name,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "max_output_tokens": draw.max_tokens,
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": draw.temperature,
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_logprobs": draw.top_logprobs,
            "top_p": draw.top_p,
            "truncation": "disabled",
        }
        self._base |= {name: body.get(name) for name in _SAID_BACK}

    def running(self) -> dict[str, Any]:
        """Return it while it is being written."""
        return self._base | {"status": "in_progress", "output": [], "usage": None}

    def ended(self, answer: Answer, items: list[dict[str, Any]]) -> dict[str, Any]:
        """Return it complete, or as complete as the token limit let it be."""
        assert answer.finished is not None
        found: dict[str, Any] = {"output": items, "usage": responses_usage(answer)}
        if answer.finished.reason == "length":
            details = {"reason": "max_output_tokens"}
            return self._base | found | {"status": "incomplete", "incomplete_details": details}
        return self._base | found | {"status": "completed", "completed_at": int(time.time())}

    def failed(self, message: str, code: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        """Return it failed."""
        error = {"code": code, "message": message}
        return self._base | {"status": "failed", "error": error, "output": items, "usage": None}
