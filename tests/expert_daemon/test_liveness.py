from __future__ import annotations

from expert_daemon.liveness import Liveness
from expert_daemon.log import CLIENT_LINES_A_MINUTE, ClientLog, flush
from expert_daemon.sessions import Session, Sessions
from protocol.wire.messages import Ping


class Outbox:
    def __init__(self) -> None:
        self.sent: list[tuple[int, Ping]] = []

    def send(self, session: Session, message: Ping) -> None:
        self.sent.append((session.number, message))


class Rig:
    def __init__(self, *roles: str) -> None:
        self.now = 100.0
        self.outbox = Outbox()
        self.sessions = Sessions()
        self.all = []
        for number, role in enumerate(roles):
            session = self.sessions.begin(bytes([number]), role, 1000 + number)
            session.is_attached = True
            if role == "engine":
                self.sessions.engine = session
            session.heard_at = self.now
            self.all.append(session)
        outbox: object = self.outbox
        clients = ClientLog()
        self.liveness = Liveness(self.sessions, outbox, clients, lambda: self.now)  # type: ignore[arg-type]

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds * 2)):
            self.now += 0.5
            self.liveness.look()


def test_one_that_talks_is_not_pinged_and_a_silent_one_once():
    rig = Rig("engine", "reader")
    for _ in range(10):
        rig.pass_time(1)
        rig.liveness.heard(rig.all[0])
    assert [number for number, _ in rig.outbox.sent] == [rig.all[1].number]


def test_an_unanswered_ping_makes_it_stuck_after_ten_seconds_until_it_is_heard(capfd):
    rig = Rig("engine")
    rig.pass_time(15)
    assert not rig.all[0].is_stuck
    rig.pass_time(1.5)
    assert rig.sessions.stuck == [rig.all[0]]
    rig.pass_time(60)
    assert len(rig.outbox.sent) == 1
    assert rig.sessions.engine is rig.all[0]
    rig.liveness.heard(rig.all[0])
    assert rig.sessions.stuck == []
    flush()
    text = capfd.readouterr().err
    assert text.count("engine of pid 1000 has not answered a Ping for 10 s: stuck") == 1
    assert text.count("answers again") == 1


def test_many_that_stop_and_go_on_have_few_lines(capfd):
    rig = Rig(*["reader"] * (CLIENT_LINES_A_MINUTE + 5))
    rig.pass_time(20)
    assert len(rig.sessions.stuck) == len(rig.all)
    flush()
    assert capfd.readouterr().err.count("has not answered a Ping") == CLIENT_LINES_A_MINUTE


def test_one_that_answers_is_pinged_again_and_never_stuck():
    rig = Rig("reader")
    for _ in range(20):
        rig.pass_time(2)
        if rig.outbox.sent and rig.all[0].pinged_at:
            rig.liveness.heard(rig.all[0])
    assert not rig.all[0].is_stuck
    assert len(rig.outbox.sent) >= 4
    assert len({ping.request for _, ping in rig.outbox.sent}) == len(rig.outbox.sent)


def test_one_that_has_not_attached_is_left_to_its_deadline():
    rig = Rig("reader")
    rig.all[0].is_attached = False
    rig.pass_time(60)
    assert rig.outbox.sent == []
