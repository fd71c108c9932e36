from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
ROOMS = ("compute", "expert_daemon", "protocol")
OF_OTHERS = {"Watchdog timeout", "Operation not permitted (src/thread.cpp"}  # systemd, ZeroMQ


def sources() -> str:
    """All source, with strings that go on in the next line joined and fields as dots."""
    text = "\n".join(path.read_text() for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    joined = re.sub(r"\"\s*\n\s*f?\"", "", text)
    return re.sub(r"\{[^{}\n]*\}", "…", joined)


def messages() -> list[str]:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [row.split("`")[1] for row in rows]


def test_every_message_of_the_page_is_in_the_source():
    source = sources()
    for message in messages():
        if message in OF_OTHERS or message == "stalled":
            continue
        parts = [part.strip() for part in re.split("…|%d|%s", message)]
        for part in (part for part in parts if len(part) > 3):
            assert part in source, f"{message!r}: {part!r} is not in the source"


def test_the_page_has_the_messages_that_people_meet():
    assert len(messages()) >= 30
