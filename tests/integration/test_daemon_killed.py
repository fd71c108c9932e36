"""kill -9 of the daemon that a command started, in mid-generation, at random instants."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from compute.commands.children import LOG_NAME
from compute.commands.opening import Opened, opened
from compute.commands.terminal import Display
from compute.config import ComputeConfig
from compute.experts.miss_client import IoCounters
from compute.sampler import Sampling
from compute.session import Finished, NewToken, Request
from protocol.errors import ConfigError, DaemonLost
from protocol.runtime_dir import LOCK_NAME

PROMPT = [0, 209, 711, 63, 1288, 278]
N_TOKENS = 24
SMALL_ARENA = 2_000_000  # about a quarter of the demo's experts: misses all the time
SLOT_PIECES_BYTES = 26_112  # what is read for one expert of the demo


@contextlib.contextmanager
def _opened(runtime_dir: Path, arena: int | None) -> Iterator[Opened]:
    config = ComputeConfig(
        precision="unrounded",
        arena=arena,
        runtime_dir=runtime_dir,
        state_dir=runtime_dir / "state",
        daemon_wait_s=30,
    )
    with opened(config, Display(quiet=True)) as ready:
        yield ready


def _generate(ready: Opened, n_tokens: int = N_TOKENS) -> tuple[list[int], IoCounters]:
    ids: list[int] = []
    for event in ready.engine.generate(Request(PROMPT, Sampling(temperature=0), n_tokens)):
        if isinstance(event, NewToken):
            ids.append(event.choice.id)
    assert isinstance(event, Finished)
    return ids, event.io


def _daemon_pid(runtime_dir: Path) -> int:
    """Of the daemon that holds the lock or held it last."""
    while not (text := (runtime_dir / LOCK_NAME).read_text()):  # one is just taking it
        time.sleep(0.001)
    return int(text)


@contextlib.contextmanager
def _killed_after(runtime_dir: Path, delay_s: float) -> Iterator[None]:
    """Kill the daemon once, `delay_s` after the block began; at its end at the latest."""
    ended = threading.Event()

    def kill() -> None:
        ended.wait(delay_s)
        with contextlib.suppress(ProcessLookupError):  # dead since the last kill
            os.kill(_daemon_pid(runtime_dir), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        ended.set()
        killer.join()


def _check_kills(runtime_dir: Path, n_kills: int, arena: int | None, seed: int) -> None:
    chosen = random.Random(seed)
    with _opened(runtime_dir, arena) as ready:
        started = time.perf_counter()
        wanted, first = _generate(ready)
        took_s = time.perf_counter() - started
        cold_reads = first.bytes_read // SLOT_PIECES_BYTES
        for _ in range(n_kills):
            with _killed_after(runtime_dir, chosen.uniform(0, took_s)):
                ids, io = _generate(ready)
            assert ids == wanted
            if arena is None:  # everything was READY: nothing of it is read again
                assert io.misses == 0
                assert io.bytes_read == 0
        if arena is None:
            assert cold_reads == first.misses
        ids, _ = _generate(ready)
        assert ids == wanted
        assert ready.engine.source.n_daemons_lost >= n_kills // 2


def test_the_text_is_the_same_and_ready_experts_are_not_read_again(runtime_dir: Path) -> None:
    _check_kills(runtime_dir, 2, None, seed=1)


def test_the_text_is_the_same_when_windows_are_cut(runtime_dir: Path) -> None:
    _check_kills(runtime_dir, 2, SMALL_ARENA, seed=2)


@pytest.mark.accept
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("arena", "seed"), [(None, 3), (SMALL_ARENA, 4)])
def test_the_text_is_the_same_after_fifty_kills(
    runtime_dir: Path, arena: int | None, seed: int
) -> None:
    _check_kills(runtime_dir, 50, arena, seed)


def test_what_was_read_before_the_kill_is_not_read_again(runtime_dir: Path) -> None:
    """Half a generation, a kill, then all of it: each expert is read once in all."""
    with _opened(runtime_dir, None) as ready:
        _, before = _generate(ready, 8)
        os.kill(_daemon_pid(runtime_dir), signal.SIGKILL)
        _, after = _generate(ready)
    with _opened(runtime_dir / "cold", None) as ready:
        _, whole = _generate(ready)
    assert before.bytes_read + after.bytes_read == whole.bytes_read


def test_a_killed_daemon_finds_the_arena_of_its_predecessor(runtime_dir: Path) -> None:
    with _opened(runtime_dir, None) as ready:
        _generate(ready)
        source = ready.engine.source
        before = source.client.welcome
        os.kill(_daemon_pid(runtime_dir), signal.SIGKILL)
        _generate(ready)
        after = source.client.welcome
        assert after.arena_id == before.arena_id
        assert after.generation == before.generation + 1


def test_a_daemon_that_cannot_start_again_ends_the_request_with_its_last_words(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _opened(runtime_dir, None) as ready:
        _generate(ready)
        child = ready.daemon.child
        assert child is not None
        monkeypatch.setattr(child, "_arguments", ["--model", "/nowhere"])
        os.kill(_daemon_pid(runtime_dir), signal.SIGKILL)
        with pytest.raises(DaemonLost, match=r"died 5 times .* no such directory"):
            _generate(ready)


def test_a_daemon_that_never_started_is_not_tried_again(runtime_dir: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"the expert daemon did not start: (?s:.*)smallest: "),
        _opened(runtime_dir, 100_000),
    ):
        pass
    assert (runtime_dir / LOG_NAME).read_text().count("smallest") == 1


def test_another_daemon_in_the_directory_is_used_and_left_running(runtime_dir: Path) -> None:
    with _opened(runtime_dir, None) as first:
        wanted, _ = _generate(first)
        pid = _daemon_pid(runtime_dir)
        first.engine.source.client.close()
        with _opened(runtime_dir, None) as second:
            assert second.daemon.child is None
            ids, io = _generate(second)
            assert ids == wanted
            assert io.misses == 0
        os.kill(pid, 0)
