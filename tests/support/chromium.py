"""Headless Chromium on a page: driven over its debugging pipe, without a package for it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-background-networking", "--disable-sync", "--hide-scrollbars"),
    *("--disable-component-update", "--remote-debugging-pipe", "about:blank"),
)


def _why_none() -> str:
    if PROGRAM is None:
        return "no Chromium is installed"
    command = [PROGRAM, "--version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"Chromium does not start: {error}"
    if done.returncode:
        return f"Chromium does not start: {done.stderr.strip() or done.returncode}"
    return ""


WHY_NONE = _why_none()  # why no page can be looked at; empty where one can


class Browser:
    """One tab. `said` holds what the page logged, its errors and refused loads among it."""

    def __init__(self, width: int = 1280, height: int = 1000) -> None:
        assert PROGRAM is not None
        self._folder = tempfile.mkdtemp(prefix="hr-chromium-")
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # The browser reads its descriptor 3 and writes 4.
        script = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$0" "$@"'
        flags = [f"--user-data-dir={self._folder}", f"--window-size={width},{height}", *_FLAGS]
        self._process = subprocess.Popen(
            ["bash", "-c", script, PROGRAM, *flags],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._held = b""
        self._number = 0
        self._session: str | None = None
        self.said: list[str] = []
        self.asked: list[str] = []  # addresses of every request of the page
        targets = self.call("Target.getTargets")["targetInfos"]
        tab = next(target["targetId"] for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=tab, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """One command, and its result."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._hear()
            if heard.get("id") == number:
                assert "error" not in heard, heard
                return heard["result"]
            self._note(heard)

    def open(self, url: str) -> None:
        """Go to a page and wait until its scripts have run."""
        self.call("Page.navigate", url=url)
        self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """What a piece of JavaScript gives; a promise is waited for."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str, seconds: float = 45.0) -> Any:
        """Wait until a piece of JavaScript gives something true."""
        ends = time.monotonic() + seconds
        while not (found := self.value(f"Boolean(document.body) && ({expression})")):
            assert time.monotonic() < ends, (expression, self.said)
            time.sleep(0.05)
        return found

    def picture(self, path: Path) -> None:
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _hear(self, seconds: float = 30.0) -> dict[str, Any]:
        ends = time.monotonic() + seconds
        while b"\0" not in self._held:
            left = max(0.0, ends - time.monotonic())
            assert select.select([self._in], [], [], left)[0], "the browser says nothing"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser has ended"
            self._held += data
        text, _, self._held = self._held.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        return found

    def _note(self, heard: dict[str, Any]) -> None:
        method, params = heard.get("method"), heard.get("params", {})
        if method == "Log.entryAdded":
            self.said.append(params["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.said.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.said.append(json.dumps(params["args"]))
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])


@contextlib.contextmanager
def browser(width: int = 1280, height: int = 1000) -> Iterator[Browser]:
    """A Browser, ended at the end."""
    opened = Browser(width, height)
    try:
        yield opened
    finally:
        opened.close()
