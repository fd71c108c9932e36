"""What a generation makes of drives that fail and of a daemon that stays away."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace
from compute.commands.opening import Opened, opened
from compute.commands.terminal import Display
from compute.config import ComputeConfig
from compute.sampler import Sampling
from compute.session import NewToken, Request
from protocol.errors import ConfigError, DaemonLost, ProtocolError, ShardError
from protocol.files.checkpoint import open_checkpoint
from tests.support.faulty_source import Faults, Rule, overlaps
from tests.support.generation import PROMPT
from tests.support.running_daemon import daemon_process, daemon_thread

ROOT = Path(__file__).resolve().parents[2]


def _ids(ready: Opened, n_tokens: int = 8) -> list[int]:
    request = Request(PROMPT, Sampling(temperature=0), n_tokens)
    events = ready.engine.generate(request)
    return [event.choice.id for event in events if isinstance(event, NewToken)]


@contextlib.contextmanager
def _attached(runtime_dir: Path, **settings: object) -> Iterator[Opened]:
    config = ComputeConfig(
        precision="unrounded",
        runtime_dir=runtime_dir,
        **settings,  # type: ignore[arg-type]
    )
    with opened(config, Display(quiet=True)) as ready:
        assert ready.daemon.child is None
        yield ready


def _gate_of(demo_dir: Path, layer: int, expert: int) -> Rule:
    checkpoint = open_checkpoint(demo_dir)
    piece = checkpoint.slice_map.slices(layer, expert)[0]
    return overlaps(checkpoint.shards.index(piece.shard), piece.offset, piece.n_bytes)


def test_a_bad_sector_fails_the_request_that_needs_it_and_nothing_else(
    runtime_dir: Path, demo_dir: Path
) -> None:
    samples = json.loads((demo_dir / "expected.json").read_text())["samples"]
    wanted = samples[0]["unrounded"]["continuation_ids"][:8]
    expert = samples[0]["unrounded"]["router_picks"]["5"][0][0]
    faults = Faults(eio=_gate_of(demo_dir, 5, expert))
    with daemon_thread(demo_dir, runtime_dir, faults), _attached(runtime_dir) as ready:
        for _ in range(2):
            with pytest.raises(ShardError, match=rf"layer 5 expert {expert}: .*EIO") as caught:
                _ids(ready)
            assert "model-00002-of-00003.safetensors" in str(caught.value)
        faults.eio = None
        assert _ids(ready) == wanted


def test_short_and_slow_reads_in_any_order_change_nothing(
    runtime_dir: Path, demo_dir: Path
) -> None:
    samples = json.loads((demo_dir / "expected.json").read_text())["samples"]
    wanted = samples[0]["unrounded"]["continuation_ids"][:8]
    faults = Faults(short=4096, delay=0.001)
    with (
        daemon_thread(demo_dir, runtime_dir, faults, arena_bytes=2_000_000),
        _attached(runtime_dir) as ready,
    ):
        assert _ids(ready) == wanted


def test_a_daemon_that_stays_away_ends_the_request_at_its_deadline(runtime_dir: Path) -> None:
    with (
        daemon_process("demo", runtime_dir) as daemon,
        _attached(runtime_dir, daemon_wait_s=0.5) as ready,
    ):
        _ids(ready)
        daemon.kill()
        started = time.monotonic()
        with pytest.raises(DaemonLost, match=r"waited 0\.5 s for its return"):
            _ids(ready)
        assert time.monotonic() - started < 5


def test_a_daemon_of_another_model_is_refused(runtime_dir: Path, tiny_dir: Path) -> None:
    with (
        daemon_process(tiny_dir, runtime_dir),
        pytest.raises(ProtocolError, match="fingerprint"),
        _attached(runtime_dir),
    ):
        pass


def test_a_daemon_that_runs_by_itself_is_found_used_and_left(
    runtime_dir: Path,
    state_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_dir))
    flags = ["--model", "demo", "--state-dir", str(state_dir)]
    command = [sys.executable, "headrace.py", "daemon", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while not (runtime_dir / "headrace" / "arena.sock").exists():
            assert time.monotonic() < deadline, "the daemon did not start"
            time.sleep(0.02)
        prompt = ["--prompt-ids", ",".join(map(str, PROMPT))]
        found = []
        for more in ([], ["--arena", "2MB"]):
            flags = ["--temperature", "0", "--max-tokens", "6", "--json", *more]
            assert headrace.main(["generate", *prompt, *flags]) == 0
            shown = capsys.readouterr()
            assert ("its own --arena holds" in shown.err) == bool(more)
            found.append(json.loads(shown.out.splitlines()[-1]))
        assert found[0]["ids"] == found[1]["ids"]
        assert found[0]["io"]["misses"] > 0
        assert found[1]["io"]["misses"] == found[1]["io"]["bytes_read"] == 0
        assert process.poll() is None
        assert [path.name for path in runtime_dir.iterdir()] == ["headrace"]
    finally:
        process.terminate()
        assert process.wait(10) == 0


def test_too_little_memory_is_said_before_the_model_is_used(runtime_dir: Path) -> None:
    config = ComputeConfig(runtime_dir=runtime_dir, state_dir=runtime_dir, arena=1 << 16)
    with pytest.raises(ConfigError, match="slots needed"), opened(config, Display(quiet=True)):
        pass
    assert os.listdir(runtime_dir)  # noqa: PTH208  its log is kept
