"""`headrace pack` killed at any moment: a later run ends with the bytes of an undisturbed one."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ShardError
from protocol.files.checkpoint import open_checkpoint
from tests.support.fake_checkpoint import edit_header, write_fake_checkpoint
from tests.support.packing import flip_bit, pack, run_command, run_until_killed, tree

ROOT = Path(__file__).resolve().parents[4]
SMALL: dict[str, Any] = {"n_layers": 2, "n_experts": 3}
STRIPED = {**SMALL, "hidden_size": 1024, "expert_width": 512}

pytestmark = pytest.mark.timeout(120)


class Case:
    """One source, its flags, and the tree that they end in."""

    def __init__(self, directory: Path, *, striped: bool):
        self.directory = directory
        self.striped = striped
        self.source = write_fake_checkpoint(directory / "src", **(STRIPED if striped else SMALL))
        self.wanted = self.result("wanted")

    def arguments(self, name: str) -> list[str]:
        home = self.directory / name / "home"
        flags = ["--jobs", "1"]
        if self.striped:  # inside the pack, so that its manifest does not depend on the name
            flags += [
                "--stripe",
                f"{home / 'x'},{home / 'y'}",
                "--mirror",
                str(home / "m"),
                "--copy",
            ]
        return ["pack", str(self.source), str(home), *flags]

    def result(self, name: str) -> dict[str, str]:
        assert run_command(*self.arguments(name)).status == 0
        return tree(self.directory / name)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "striped"])
def case(request, tmp_path_factory):
    return Case(tmp_path_factory.mktemp("resume"), striped=request.param)


def count_calls(case: Case) -> int:
    """How many calls an undisturbed run makes, found by doubling and halving."""
    low, high = 0, 1024
    while high - low > 1:
        middle = (low + high) // 2
        name = f"count-{middle}"
        killed = run_until_killed(case.arguments(name), middle)
        shutil.rmtree(case.directory / name)
        low, high = (middle, high) if killed else (low, middle)
    return low


def check_killed_once(case: Case, n_calls: int, *, tear: bool):
    name = f"killed-{n_calls}-{tear}"
    killed = run_until_killed(case.arguments(name), n_calls, tear=tear)
    home = case.directory / name / "home"
    if killed and home.exists() and not (home / "pack.json").exists() and list(home.iterdir()):
        with pytest.raises(ShardError):
            open_checkpoint(home) if (home / "config.json").exists() else unfinished()
    assert case.result(name) == case.wanted, f"killed at call {n_calls}"
    shutil.rmtree(case.directory / name)


def unfinished():
    raise ShardError("no config yet")


def test_killed_here_and_there_it_ends_with_the_same_bytes(case: Case):
    n_calls = count_calls(case)
    assert n_calls > 40
    rng = random.Random(3)
    for number in sorted(rng.sample(range(1, n_calls + 1), 6)):
        check_killed_once(case, number, tear=rng.random() < 0.5)


def test_killed_again_and_again_it_ends_with_the_same_bytes(case: Case):
    rng = random.Random(5)
    killed = 0
    while run_until_killed(case.arguments("again"), rng.randrange(4, 70), tear=True):
        killed += 1
        assert killed < 200, "no progress"
    assert killed > 0
    assert case.result("again") == case.wanted
    shutil.rmtree(case.directory / "again")


@pytest.mark.accept
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tear", [False, True])
def test_killed_at_every_single_call(case: Case, tear: bool):
    for number in itertools.count(1):
        name = f"every-{number}-{tear}"
        killed = run_until_killed(case.arguments(name), number, tear=tear)
        assert case.result(name) == case.wanted, f"killed at call {number}"
        shutil.rmtree(case.directory / name)
        if not killed:
            break
    assert number > 40


@pytest.mark.accept
@pytest.mark.timeout(1800)
def test_killed_at_random_times_with_many_threads(tmp_path: Path):
    source = write_fake_checkpoint(
        tmp_path / "src", n_layers=6, n_experts=24, hidden_size=1024, expert_width=512
    )
    pack(source, tmp_path / "wanted", "--copy")
    wanted = tree(tmp_path / "wanted")
    rng = random.Random(11)
    n_killed = 0
    command = [sys.executable, "-m", "headrace", "pack", str(source), str(tmp_path / "b"), "--copy"]
    for _ in range(100):
        child = subprocess.Popen(
            [*command, "--jobs", "6"], env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while child.poll() is None and not (tmp_path / "b" / ".pack" / "done.jsonl").exists():
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.1))
        child.send_signal(signal.SIGKILL)
        if child.wait() == 0:
            break
        n_killed += 1
    pack(source, tmp_path / "b", "--copy")
    assert n_killed > 0
    assert tree(tmp_path / "b") == wanted


@pytest.fixture
def begun(tmp_path: Path):
    """A pack that was killed in the middle: source, target."""
    source = write_fake_checkpoint(tmp_path / "src", **SMALL)
    arguments = ["pack", str(source), str(tmp_path / "b"), "--jobs", "1"]
    assert run_until_killed(arguments, 60)
    return source, tmp_path / "b"


def test_an_unfinished_pack_is_refused_when_opened(begun):
    _, target = begun
    assert (target / "config.json").exists()
    with pytest.raises(ShardError, match="never finished"):
        open_checkpoint(target)


def test_finished_records_are_not_written_again(begun):
    source, target = begun
    events = pack(source, target, "--json").events
    begin = next(event for event in events if event["event"] == "begin")
    assert begin["resumed"] is True
    assert events[-1]["bytes_kept"] > 0


def test_a_record_that_was_damaged_meanwhile_is_written_again(begun, tmp_path: Path):
    source, target = begun
    (part,) = target.glob("experts-*.part")
    flip_bit(part, 4096 + 10)
    pack(source, target)
    pack(source, tmp_path / "c")
    assert tree(target) == tree(tmp_path / "c")


@pytest.mark.parametrize("change", ["time", "size", "header", "config"])
def test_a_source_that_changed_is_refused_on_resume(begun, change: str):
    source, target = begun
    shard = source / "model-00001-of-00003.safetensors"
    if change == "time":
        os.utime(shard, (1, 1))
    elif change == "size":  # refused as a damaged checkpoint before anything else
        with shard.open("ab") as file:
            file.write(b"more")
    elif change == "header":
        times = (shard.stat().st_atime_ns, shard.stat().st_mtime_ns)
        edit_header(shard, lambda header: header["__metadata__"].update(format="np"))
        os.utime(shard, ns=times)
    else:
        path = source / "config.json"
        times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
        path.write_text(json.dumps(json.loads(path.read_text()), indent=2))
        os.utime(path, ns=times)
    before = tree(target)
    outcome = run_command("pack", source, target)
    assert outcome.status == 1
    assert ("config.json" if change == "config" else shard.name) in outcome.err
    assert tree(target) == before


def test_other_flags_are_refused_on_resume(begun, tmp_path: Path):
    source, target = begun
    outcome = run_command("pack", source, target, "--copy")
    assert outcome.status == 2
    assert "engram 'linked', now wanted 'copied'" in outcome.err
    outcome = run_command("pack", source, target, "--mirror", tmp_path / "m")
    assert "mirror" in outcome.err


def test_a_second_pack_into_the_same_directory_is_refused(begun):
    import fcntl

    source, target = begun
    with (target / ".pack" / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        outcome = run_command("pack", source, target)
    assert outcome.status == 2
    assert "another headrace pack" in outcome.err


def test_a_changed_source_of_a_finished_pack_is_refused(tmp_path: Path):
    source = write_fake_checkpoint(tmp_path / "src", **SMALL)
    pack(source, tmp_path / "b", "--layers", "0")
    os.utime(source / "tokenizer.json", (1, 1))
    outcome = run_command("pack", source, tmp_path / "b", "--layers", "1")
    assert outcome.status == 1
    assert "tokenizer.json was written to" in outcome.err


def test_interrupting_leaves_what_a_later_run_takes_up(tmp_path: Path):
    source = write_fake_checkpoint(
        tmp_path / "src", n_layers=4, n_experts=24, hidden_size=1024, expert_width=512
    )
    command = [sys.executable, "-m", "headrace", "pack", str(source), str(tmp_path / "b")]
    child = subprocess.Popen(
        [*command, "--jobs", "1"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("b/experts-*")) and time.monotonic() < deadline:
        time.sleep(0.005)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=30)
    assert child.returncode in {0, 130}, err
    pack(source, tmp_path / "b")
    pack(source, tmp_path / "c")
    assert tree(tmp_path / "b") == tree(tmp_path / "c")
