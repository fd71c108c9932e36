from __future__ import annotations

import pytest

from expert_daemon.metrics import Counters
from expert_daemon.outbox import MOST_CHARACTERS, Outbox
from expert_daemon.sessions import Session
from protocol.wire.codec import decode
from protocol.wire.messages import Answered, Changes, Leased, Pong, Refused


class Rig:
    """An outbox, what it sent and what it logged."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, object]] = []
        self.lines: list[str] = []
        self.lost: list[Session] = []
        self.counters = Counters()
        rig: object = self
        self.outbox = Outbox(rig, 7, self.counters, self.lost.append, rig)  # type: ignore[arg-type]
        self.session = Session(3, b"route", "reader", 4711)

    def send(self, route: bytes, frame: bytes, *, keep: bool = True) -> bool:
        envelope = decode(frame)
        self.sent.append((route, envelope.message))
        return keep

    def note(self, line: str) -> None:
        self.lines.append(line)


TOO_LARGE = Leased(5, (), tuple((0, n, "EIO", "x" * 200) for n in range(6000)))
TOO_LONG = Answered(5, ok=False, text="x" * 9000)
NO_TEXT = Answered(5, ok=False, text="file \udce9")


@pytest.mark.parametrize("message", [TOO_LARGE, TOO_LONG, NO_TEXT])
def test_an_answer_that_cannot_be_encoded_is_refused_in_its_place(message):
    rig = Rig()
    rig.outbox.send(rig.session, message)
    rig.outbox.send(rig.session, Pong(6))
    (route, refusal), (_, pong) = rig.sent
    assert isinstance(refusal, Refused)
    assert (route, refusal.reason, refusal.request) == (b"route", "limit", 5)
    assert f"cannot be sent: {type(message).__name__}" in refusal.text
    assert pong == Pong(6)
    (line,) = rig.lines
    assert "pid 4711" in line
    assert refusal.text in line
    assert rig.lost == []


def test_changes_that_cannot_be_encoded_are_refused_without_a_number():
    rig = Rig()
    rig.outbox.send(rig.session, Changes(2, 1, tuple((n, n, n) for n in range(200_000))))
    ((_, refusal),) = rig.sent
    assert isinstance(refusal, Refused)
    assert refusal.request == 0


LONG, WIDE, NO_UNICODE = "x" * 100_000, "\u20ac" * 100_000, "\udce9" * 20


@pytest.mark.parametrize("text", [LONG, WIDE, NO_UNICODE], ids=["long", "wide", "no unicode"])
def test_a_refusal_may_say_anything_and_is_short(text):
    rig = Rig()
    rig.outbox.refuse(b"route", Refused("malformed", text, 0, 0, 8), rig.session)
    rig.outbox.refuse(b"other", Refused("malformed", text, 0, 0, 8))
    for _, refusal in rig.sent:
        assert isinstance(refusal, Refused)
        assert refusal.request == 8
        assert 20 <= len(refusal.text) <= MOST_CHARACTERS
    assert len(rig.sent) == len(rig.lines) == 2
