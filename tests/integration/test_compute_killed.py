"""kill -9 of the compute process while the daemon lives on by itself."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compute.commands.opening import opened
from compute.commands.terminal import Display
from compute.config import ComputeConfig
from protocol.errors import DaemonBusy
from tests.support.generation import GeneratingProcess, generate
from tests.support.running_daemon import DaemonProcess, daemon_process

N_TOKENS = 24
SMALL_ARENA = "2MB"


@contextlib.contextmanager
def _process(runtime_dir: Path, n_tokens: int = N_TOKENS) -> Iterator[GeneratingProcess]:
    process = GeneratingProcess(runtime_dir, n_tokens)
    try:
        yield process
    finally:
        process.close()


def _check_kills(daemon: DaemonProcess, n_kills: int, seed: int, *, resident: bool) -> None:
    chosen = random.Random(seed)
    runtime_dir = daemon.runtime_dir
    wanted: list[int] = generate(runtime_dir, N_TOKENS)["ids"]
    started = time.perf_counter()
    with _process(runtime_dir) as whole:
        assert whole.result()["ids"] == wanted
    took_s = time.perf_counter() - started
    for _ in range(n_kills):
        with _process(runtime_dir) as process:
            time.sleep(chosen.uniform(0, took_s))
            process.kill()
        if resident:
            _check_next(generate(runtime_dir, N_TOKENS), wanted)
    _check_next(generate(runtime_dir, N_TOKENS), wanted, resident=resident)
    assert daemon.is_alive


def _check_next(found: dict[str, Any], wanted: list[int], *, resident: bool = True) -> None:
    assert found["ids"] == wanted
    if resident:
        assert found["misses"] == 0
        assert found["bytes_read"] == 0


def test_the_next_engine_finds_the_experts_there(runtime_dir: Path) -> None:
    with daemon_process("demo", runtime_dir) as daemon:
        _check_kills(daemon, 1, seed=1, resident=True)


def test_the_next_engine_is_right_after_windows_were_cut(runtime_dir: Path) -> None:
    with daemon_process("demo", runtime_dir, "--arena", SMALL_ARENA) as daemon:
        _check_kills(daemon, 2, seed=2, resident=False)


@pytest.mark.accept
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("flags", "seed"), [((), 3), (("--arena", SMALL_ARENA), 4)])
def test_the_next_engine_is_right_after_fifty_kills(
    runtime_dir: Path, flags: tuple[str, ...], seed: int
) -> None:
    with daemon_process("demo", runtime_dir, *flags) as daemon:
        _check_kills(daemon, 50, seed, resident=not flags)


def test_a_second_engine_waits_for_the_first_and_then_runs(runtime_dir: Path) -> None:
    config = ComputeConfig(runtime_dir=runtime_dir, daemon_wait_s=20)
    with daemon_process("demo", runtime_dir), contextlib.ExitStack() as first:
        first.enter_context(opened(config, Display(quiet=True)))
        with _process(runtime_dir, 4) as second:
            assert not second.has_ended(within_s=2)
            first.close()
            assert len(second.result()["ids"]) == 4


def test_a_second_engine_gives_up_at_its_deadline_and_names_the_first(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ComputeConfig(runtime_dir=runtime_dir)
    second = ComputeConfig(runtime_dir=runtime_dir, daemon_wait_s=2.5)
    told: list[tuple[float, str]] = []  # when each line came, and the line
    monkeypatch.setattr(Display, "line", lambda _, line: told.append((time.monotonic(), line)))
    with daemon_process("demo", runtime_dir) as daemon, opened(first, Display(quiet=True)):
        started = time.monotonic()
        with (
            pytest.raises(DaemonBusy, match=r"\(pid \d+\) is attached; waited 2.5 s") as caught,
            opened(second, Display(quiet=True)),
        ):
            pass
        assert time.monotonic() - started < 10
    log = daemon.log.read_text()
    assert log.count("refused (busy)") == log.count(f"refused (busy) to pid {os.getpid()}: ") == 1
    advice = "ask the server over HTTP, or give another --runtime-dir"
    assert str(caught.value).endswith(advice)
    assert str(caught.value).count(f"pid {os.getpid()}") == 1
    [(when, line)] = told
    assert line == (
        f"pid {os.getpid()} uses the daemon in {runtime_dir} (a server, perhaps): "
        f"waiting up to 2.5 s; or {advice}"
    )
    assert when - started < 1.5
