from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from expert_daemon import arena as arenas
from expert_daemon.arena import Arena, ArenaOf, open_arena, plan, process_start
from protocol.files.checkpoint import open_checkpoint
from tests.support.fake_checkpoint import write_fake_checkpoint
from tests.support.scarce_descriptors import no_descriptors

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def engine() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until it is killed."""
    program = "import sys; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[Arena | None], Arena]]:
    """Opens a new arena, or one that another daemon left."""
    checkpoint = open_checkpoint(write_fake_checkpoint(tmp_path / "model", n_layers=2))
    planned = plan(checkpoint, size_bytes=8 << 20, max_bytes=0, top_k_batch=2)
    whose = ArenaOf(checkpoint.fingerprint, 1, tmp_path)
    made: list[Arena] = []

    def open_one(left: Arena | None = None) -> Arena:
        passed = os.dup(left.descriptor) if left else None
        made.append(open_arena(planned, whose, passed))
        return made[-1]

    yield open_one
    for arena in made:
        os.close(arena.descriptor)


def test_the_start_of_a_process_is_unknown_without_descriptors_and_0_where_there_is_none(
    engine: subprocess.Popen[bytes],
) -> None:
    assert process_start(engine.pid) > 0
    with no_descriptors(), pytest.raises(OSError, match="Too many open files"):
        process_start(engine.pid)
    engine.kill()
    engine.wait()
    assert process_start(engine.pid) == 0


def test_an_engine_noted_without_descriptors_lives_for_the_next_daemon_until_it_ends(
    engine: subprocess.Popen[bytes], opened: Callable[[Arena | None], Arena]
) -> None:
    left = opened(None)
    with no_descriptors():
        left.note_engine(engine.pid)
    assert opened(left).engine_pid == engine.pid
    engine.kill()
    engine.wait()
    assert opened(left).engine_pid == 0


def test_an_engine_that_cannot_be_looked_for_counts_as_alive(
    engine: subprocess.Popen[bytes],
    opened: Callable[[Arena | None], Arena],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(_pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    left = opened(None)
    left.note_engine(engine.pid)
    monkeypatch.setattr(arenas, "process_start", fails)
    assert opened(left).engine_pid == engine.pid
