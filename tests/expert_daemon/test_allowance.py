from __future__ import annotations

from types import SimpleNamespace

from expert_daemon import allowance, log
from expert_daemon.allowance import Allowance
from expert_daemon.log import CLIENT_LINES_A_MINUTE, ClientLog


def test_no_more_than_the_amount_is_spent_in_a_period_and_nothing_is_saved_up(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(allowance, "time", SimpleNamespace(monotonic=lambda: clock.now))
    ours = Allowance(3, 10.0)
    assert [ours.spend(1) for _ in range(5)] == [True, True, True, False, False]
    clock.now += 9.9
    assert not ours.spend(1)
    clock.now += 25
    assert ours.spend(2)
    assert not ours.spend(2)
    assert ours.spend(1)
    assert not ours.spend(1)


def test_lines_about_clients_are_so_many_a_minute_and_the_others_are_counted(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    lines: list[str] = []
    monkeypatch.setattr(allowance, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(log, "log", lines.append)
    ours = ClientLog()
    for number in range(CLIENT_LINES_A_MINUTE + 7):
        ours.note(str(number))
    assert lines == [str(number) for number in range(CLIENT_LINES_A_MINUTE)]
    clock.now = 61.0
    ours.note("again")
    assert lines[CLIENT_LINES_A_MINUTE:] == ["7 lines about clients were left out", "again"]
