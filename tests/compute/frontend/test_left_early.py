"""A client that leaves before the first event leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, MutableMapping
from pathlib import Path
from typing import Any, cast

import pytest

from compute.frontend.answer import Answer
from compute.frontend.followed import Followed
from compute.frontend.http.event_stream import EventStream
from protocol.files.checkpoint import open_checkpoint
from tests.support.running_frontend import ask_and_leave, eventually, running_frontend
from tests.support.scripted_compute import scripted_compute

DEMO = Path(__file__).resolve().parents[3] / "demo"


class _Answer:
    """An answer that nobody has begun to read."""

    finished = None

    def __init__(self) -> None:
        self.n_cancelled = 0

    def cancel(self) -> None:
        self.n_cancelled += 1

    async def steps(self) -> AsyncGenerator[Any, None]:
        await asyncio.sleep(0)
        yield None


def test_steps_that_were_never_begun_are_cancelled_and_told_once() -> None:
    async def left() -> None:
        await steps.aclose()
        await steps.aclose()

    answer, told = _Answer(), list[str]()
    steps = Followed(cast(Answer, answer), told.append)
    asyncio.run(left())
    assert (answer.n_cancelled, told) == (1, ["left"])


@pytest.mark.parametrize("slow_start", [False, True])
def test_a_stream_whose_client_has_left_ends_what_its_events_hold(slow_start: bool) -> None:
    async def left() -> MutableMapping[str, Any]:
        return {"type": "http.disconnect"}

    async def send(_message: MutableMapping[str, Any]) -> None:
        await asyncio.sleep(60 if slow_start else 0)

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"first"
        yield b"second"

    answer, told = _Answer(), list[str]()
    steps = Followed(cast(Answer, answer), told.append)
    stream = EventStream(events(), write_timeout_s=60, at_end=steps.aclose)
    asyncio.run(stream({"type": "http"}, left, send))
    assert (answer.n_cancelled, told) == (1, ["left"])


def test_a_storm_of_streams_left_at_once_leaves_no_generation() -> None:
    directory = Path(tempfile.mkdtemp(prefix="hr-", dir="/tmp"))
    moments = random.Random(1)
    with (
        scripted_compute(
            directory, fingerprint=open_checkpoint(DEMO).fingerprint, max_waiting=200
        ) as compute,
        running_frontend(directory) as web,
    ):
        web.joined()
        compute.says = [300]
        compute.gate.clear()
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        for _ in range(120):
            ask_and_leave(web.url, "/v1/chat/completions", body, moments.random() * 0.01)
        time.sleep(0.1)
        eventually(lambda: web.frontend.link.n_generations == 0, 5.0)
        eventually(lambda: compute.queue.n_waiting == 0, 5.0)
        compute.gate.set()
    shutil.rmtree(directory)
