from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from expert_daemon import engine_watch
from expert_daemon.engine_watch import EngineWatch
from tests.support.scarce_descriptors import no_descriptors

pytestmark = pytest.mark.timeout(30)


class Rig:
    """A watch over a process that ends when told to."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.n_gone = 0
        self.watch = EngineWatch(self.loop, self._gone)
        program = "import sys; sys.stdin.read()"
        self.engine = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)

    def _gone(self) -> None:
        self.n_gone += 1

    def run(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def run_until_gone(self) -> None:
        ends = time.monotonic() + 10
        while not self.n_gone:
            assert time.monotonic() < ends
            self.run(0.01)

    def close(self) -> None:
        self.watch.end()
        self.loop.close()
        self.engine.kill()
        self.engine.communicate()


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(engine_watch, "LOOK_AGAIN_S", 0.02)
    with contextlib.closing(Rig()) as made:
        yield made


@pytest.mark.parametrize("connected", [True, False])
def test_an_engine_that_cannot_be_watched_for_want_of_descriptors_is_not_gone(
    rig: Rig, connected: bool
) -> None:
    with no_descriptors():
        rig.watch.begin(rig.engine.pid, connected=connected)
        rig.watch.disconnected()
        rig.run(0.1)
        assert (rig.watch.absent, rig.n_gone) == (True, 0)
        rig.engine.kill()
        rig.engine.wait()
        rig.run_until_gone()
    assert rig.watch.pid == 0
    assert rig.n_gone == 1


def test_an_engine_is_watched_as_ever_once_there_are_descriptors_again(rig: Rig) -> None:
    with no_descriptors():
        rig.watch.begin(rig.engine.pid, connected=True)
    rig.run(0.1)
    rig.engine.kill()  # not waited for: it is still a process, which a look alone would take it for
    rig.run(0.1)
    assert rig.n_gone == 0  # it is connected
    rig.watch.disconnected()
    rig.run_until_gone()


def test_a_process_that_is_gone_already_is_gone_with_its_connection(rig: Rig) -> None:
    rig.engine.kill()
    rig.engine.wait()
    rig.watch.begin(rig.engine.pid, connected=True)
    rig.run(0.05)
    assert rig.n_gone == 0
    rig.watch.disconnected()
    rig.run_until_gone()
    rig.watch.begin(rig.engine.pid, connected=False)
    rig.run(0.05)
    assert rig.n_gone == 2


def test_who_is_watched_no_more_is_not_looked_for(rig: Rig) -> None:
    with no_descriptors():
        rig.watch.begin(rig.engine.pid, connected=False)
        rig.watch.end()
        rig.engine.kill()
        rig.engine.wait()
        rig.run(0.1)
    assert rig.n_gone == 0
