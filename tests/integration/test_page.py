"""The built-in page: its files, and what a person sees of it in headless Chromium.

`HEADRACE_PICTURE=docs/page.png pytest tests/integration/test_page.py` makes the picture anew.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from compute.frontend.http.page import PAGE_FILES, POLICY
from tests.support.chromium import WHY_NONE, Browser, browser
from tests.support.serving import Serving, serving

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "compute" / "frontend" / "page"
N_KEYS = 8 * 32
in_a_browser = pytest.mark.skipif(bool(WHY_NONE), reason=WHY_NONE)


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    directory = Path(tempfile.mkdtemp(prefix="hr-", dir="/tmp"))
    with serving(directory, "--arena", "24MiB") as served:
        yield served
    shutil.rmtree(directory)


@pytest.fixture
def page(served: Serving) -> Iterator[Browser]:
    with browser(1280, 1080) as opened:
        opened.open(served.url)
        opened.until("document.querySelector('#status')?.textContent === 'ready'")
        yield opened
        assert opened.said == []
        assert [url for url in opened.asked if not url.startswith((served.url, "data:"))] == []


def _send(page: Browser, text: str) -> None:
    page.value(f"at('text').value = {text!r}; at('most').value = 24; at('temperature').value = 0")
    page.value("at('say').requestSubmit()")


def test_every_file_is_served_with_a_policy_that_lets_nothing_else_in(served: Serving) -> None:
    for path, (name, kind) in PAGE_FILES.items():
        reply = served.ask(path)
        assert reply.status == 200
        assert reply.headers["content-type"] == kind
        assert reply.headers["content-security-policy"] == POLICY
        assert reply.body == (FOLDER / name).read_bytes()
    assert sorted(file.name for file in FOLDER.iterdir()) == sorted(
        name for name, _ in PAGE_FILES.values()
    )


def test_the_files_name_no_other_place() -> None:
    text = "".join(file.read_text() for file in FOLDER.iterdir())
    assert not re.findall(r"https?://|//[a-z]+\.", text)
    page = (FOLDER / "index.html").read_text()
    assert not re.findall(r"\son[a-z]+=|\sstyle=|<style|<script(?! src=)", page)


def test_the_page_needs_no_token_and_what_it_shows_does(tmp_path: Path) -> None:
    directory = Path(tempfile.mkdtemp(prefix="hr-", dir="/tmp"))
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text("open-sesame\n")
    with serving(directory, "--token-file", str(tokens)) as served:
        assert {path: served.ask(path).status for path in PAGE_FILES} == dict.fromkeys(
            PAGE_FILES, 200
        )
        assert served.ask("/v1/headrace/state").status == 401
        if not WHY_NONE:
            with browser() as page:
                page.open(served.url)
                page.until("document.querySelector('#token')?.hidden === false")
                page.value("at('token-text').value = 'open-sesame'; at('token').requestSubmit()")
                page.until("document.querySelector('#status').textContent === 'ready'")
    shutil.rmtree(directory)


@in_a_browser
def test_a_talk_is_answered_and_shown_with_what_it_cost(page: Browser) -> None:
    _send(page, "Who goes there?")
    page.until("/tokens after/.test(document.querySelector('.assistant .cost')?.textContent)")
    assert page.value("document.querySelector('.user').textContent") == "Who goes there?"
    assert page.value("document.querySelector('.assistant').children[1].textContent.length") > 10
    page.until("/length|stop/.test(document.querySelector('#rows tr')?.cells[2].textContent)")
    cells = page.value("[...document.querySelector('#rows tr').cells].map(c => c.textContent)")
    assert cells[1:3] in (["/v1/chat/completions", "length"], ["/v1/chat/completions", "stop"])
    # A second turn goes on from the first.
    _send(page, "Go on.")
    page.until("document.querySelectorAll('.assistant').length === 2")
    page.until("/tokens after/.test([...document.querySelectorAll('.cost')].at(-1).textContent)")
    cached = page.value("[...document.querySelectorAll('.cost')].at(-1).textContent")
    assert int(re.findall(r"\((\d+) cached\)", cached)[0]) > 0
    if picture := os.environ.get("HEADRACE_PICTURE"):
        page.until("document.querySelectorAll('#rows tr').length >= 2")
        page.until(
            "![...document.querySelectorAll('#rows td')].some(c => c.textContent === 'running')"
        )
        page.until("at('status').textContent === 'ready'")
        page.value("document.activeElement.blur()")
        page.picture(ROOT / picture)


@in_a_browser
def test_the_map_has_a_dot_for_each_expert_that_is_in_memory(page: Browser) -> None:
    _send(page, "Who goes there?")
    page.until("/tokens after/.test(document.querySelector('.assistant .cost')?.textContent)")
    state = "fetch('/v1/headrace/state').then(answer => answer.json())"
    page.until(f"{state}.then(s => s.compute.state === 'idle')")
    there = page.value(f"{state}.then(s => s.tiers.experts.arena)")
    assert 0 < there < N_KEYS
    page.until(f"at('map-says').textContent.includes('{there} of {N_KEYS} are in memory')")
    assert page.value("[at('map').width, at('map').height]") == [32, 8]
    count = (
        "(() => { const seen = {}; const data = at('map').getContext('2d')"
        ".getImageData(0, 0, 32, 8).data;"
        "for (let i = 0; i < data.length; i += 4) {"
        "  const key = data.slice(i, i + 3).join(); seen[key] = (seen[key] || 0) + 1; }"
        "return Object.values(seen).sort((a, b) => a - b) })()"
    )
    assert page.value(count) == sorted([there, N_KEYS - there])


@in_a_browser
def test_an_answer_can_be_stopped_and_a_talk_begun_anew(page: Browser, served: Serving) -> None:
    served.kill("daemon")  # so that it takes its time
    _send(page, "Speak at length.")
    page.until("at('send').textContent === 'Stop'")
    ends = (
        "fetch('/v1/headrace/state?last=1').then(a => a.json())"
        ".then(s => s.requests.length && s.requests[0].end === '{}')"
    )
    page.until(ends.format("running"))
    page.value("at('send').click()")
    page.until("at('send').textContent === 'Send'")
    assert page.value("document.querySelector('.assistant .cost').textContent") == "stopped"
    page.until(ends.format("left"))
    page.value("at('fresh').click()")
    assert page.value("document.querySelectorAll('.turn').length") == 0
