"""`headrace generate` over the demo, with the daemon that it starts."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

import headrace

PLAY = "0,209,711,63,1288,278"


@pytest.fixture(autouse=True)
def _own_directories(runtime_dir: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No daemon of the machine's user is in the way, and nothing is kept."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_dir))
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(state_dir))


def _object(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What `headrace generate --json` printed as its last line."""
    assert headrace.main(["generate", "--json", *arguments]) == 0
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def _smallest(capsys: pytest.CaptureFixture[str]) -> str:
    status = headrace.main(["generate", "--prompt-ids", PLAY, "--arena", "100KiB"])
    assert status == 2
    error = capsys.readouterr().err
    for addend in ("2 x top-k x batch", "free pool", "readers' leases", "prefill window"):
        assert addend in error
    match = re.search(r"smallest: (\d+) bytes", error)
    assert match is not None
    return match[1]


def test_one_object_says_what_was_written_and_what_it_took(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = _object(capsys, "--prompt-ids", PLAY, "--temperature", "0", "--max-tokens", "6")
    assert found["prompt_ids"] == [0, 209, 711, 63, 1288, 278]
    assert len(found["ids"]) == 6
    assert found["text"] == "I will not be so bold"
    assert found["finish"] == "length"
    assert found["tokens_per_second"] > 0
    assert set(found["io"]) == {"hits", "misses", "bytes_read", "stall_ms"}
    assert found["io"]["misses"] > 0
    assert found["io"]["bytes_read"] >= found["io"]["misses"] * 26_112
    assert found["io"]["stall_ms"] > 0


def test_the_ids_are_the_same_with_the_smallest_arena_half_and_all(
    capsys: pytest.CaptureFixture[str], demo_dir: Path
) -> None:
    samples = json.loads((demo_dir / "expected.json").read_text())["samples"]
    wanted = samples[0]["unrounded"]["continuation_ids"][:24]
    common = ["--prompt-ids", PLAY, "--temperature", "0", "--max-tokens", str(len(wanted))]
    misses = []
    for arena in (_smallest(capsys), "4MB", "16MB"):
        found = _object(capsys, *common, "--precision", "unrounded", "--arena", arena)
        assert found["ids"] == wanted
        misses.append(found["io"]["misses"])
    assert misses[0] > misses[1] > misses[2]


def test_a_long_prompt_in_chunks_gives_the_same_with_the_smallest_arena(
    capsys: pytest.CaptureFixture[str], demo_dir: Path
) -> None:
    samples = json.loads((demo_dir / "expected.json").read_text())["samples"]
    long = next(sample for sample in samples if sample["name"] == "long")
    prompt = ",".join(map(str, long["prompt_ids"]))
    common = ["--prompt-ids", prompt, "--temperature", "0", "--max-tokens", "4"]
    for arena, chunk in ((_smallest(capsys), "512"), ("16MB", "100")):
        found = _object(
            capsys, *common, "--precision", "unrounded", "--arena", arena, "--chunk", chunk
        )
        assert found["ids"] == long["unrounded"]["continuation_ids"][:4]


def test_a_text_prompt_begins_with_the_begin_token_and_markers_stay_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "LOUIS.\n<think>"
    plain = _object(capsys, text, "--max-tokens", "1")["prompt_ids"]
    assert plain[0] == 0
    assert 7 not in plain
    marked = _object(capsys, text, "--max-tokens", "1", "--markers")["prompt_ids"]
    assert marked[0] == 0
    assert marked[-1] == 7


def test_a_prompt_may_be_piped_in_and_must_be_utf8(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"LOUIS.\n"), "utf-8"))
    assert _object(capsys, "--max-tokens", "1")["prompt_ids"][0] == 0
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"LOU\xff"), "utf-8"))
    assert headrace.main(["generate"]) == 2
    assert "byte 3 is not UTF-8" in capsys.readouterr().err


def test_sampling_repeats_with_the_seed_that_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = _object(capsys, "KING HENRY.\n", "--max-tokens", "12")
    again = _object(capsys, "KING HENRY.\n", "--max-tokens", "12", "--seed", str(first["seed"]))
    assert again["ids"] == first["ids"]


def test_a_stop_string_ends_the_text_and_log_probabilities_come_when_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--prompt-ids", PLAY, "--temperature", "0", "--stop", " bold", "--logprobs", "2"]
    found = _object(capsys, *flags)
    assert found["finish"] == "stop"
    assert found["text"] == "I will not be so"
    assert [entry["id"] for entry in found["logprobs"]] == found["ids"]
    assert all(len(entry["top"]) == 2 and entry["logprob"] < 0 for entry in found["logprobs"])


def test_text_goes_to_standard_output_and_the_closing_line_to_standard_error(
    capsys: pytest.CaptureFixture[str], runtime_dir: Path
) -> None:
    flags = ["--prompt-ids", PLAY, "--temperature", "0", "--max-tokens", "6"]
    assert headrace.main(["generate", *flags]) == 0
    shown = capsys.readouterr()
    assert shown.out == "I will not be so bold\n"
    assert re.fullmatch(
        r"6 tokens, [\d.]+ tokens/s \(prompt: 6, \d+ tokens/s\), \d+ hits, \d+ misses, "
        r"[\d.]+ [KM]iB read, \d+ ms stalled, length\n",
        shown.err,
    )
    assert list(runtime_dir.iterdir()) == []  # the private directory went with its daemon


@pytest.mark.parametrize("is_given", [False, True])
def test_on_a_terminal_a_line_says_that_a_daemon_is_started_and_where_none_was(
    capsys: pytest.CaptureFixture[str],
    runtime_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_given: bool,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # standard error passes for a terminal
    if not is_given and Path("/run/headrace").exists():
        pytest.skip("this machine has /run/headrace")
    where = runtime_dir / ("mine" if is_given else "headrace")
    flags = ["--prompt-ids", PLAY, "--max-tokens", "1"]
    flags += ["--runtime-dir", str(where)] if is_given else []
    line = f"no daemon in {where}: starting one for this run\n"
    assert headrace.main(["generate", *flags]) == 0
    assert capsys.readouterr().err.count(line) == 1
    assert headrace.main(["generate", "--json", *flags]) == 0
    assert "no daemon" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-ids", PLAY, "--context", "5"], "prompt has 6 tokens, the context 5"),
        (["--prompt-ids", "0,4096"], "id 4096 at place 1 is outside the vocabulary of 4096"),
        (["--prompt-ids", "-1"], "id -1 at place 0 is outside the vocabulary"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert headrace.main(["generate", *arguments]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def _start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "headrace.py", "generate", "--prompt-ids", PLAY, *arguments]
    return subprocess.Popen(
        command,
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_an_interrupt_ends_with_the_closing_line(runtime_dir: Path) -> None:
    process = _start("--temperature", "0", "--max-tokens", "3000")
    assert process.stdout is not None
    assert process.stdout.read(1) == "I"
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert " ms stalled, cancelled" in error
    assert "Traceback" not in error
    assert out.endswith("\n")
    assert list(runtime_dir.iterdir()) == []


def test_a_killed_command_takes_its_daemon_along_and_the_next_one_clears_up(
    capsys: pytest.CaptureFixture[str], runtime_dir: Path
) -> None:
    process = _start("--temperature", "0", "--max-tokens", "3000")
    assert process.stdout is not None
    assert process.stdout.read(1) == "I"
    (left,) = runtime_dir.iterdir()
    daemon = int((left / "expertd.lock").read_text())
    process.kill()
    process.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while _runs(daemon):
        assert time.monotonic() < deadline, "the daemon outlived its parent"
        time.sleep(0.02)
    _object(capsys, "--prompt-ids", PLAY, "--max-tokens", "1")
    assert list(runtime_dir.iterdir()) == []


def test_commands_at_once_do_not_meet() -> None:
    processes = [_start("--temperature", "0", "--max-tokens", "6", "--json") for _ in range(2)]
    outs = [process.communicate(timeout=60)[0] for process in processes]
    assert [json.loads(out)["text"] for out in outs] == ["I will not be so bold"] * 2


def test_without_a_runtime_directory_of_the_user_a_private_one_is_made(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    before = set(Path(tempfile.gettempdir()).glob(f"headrace-{os.getpid()}-*"))
    assert _object(capsys, "--prompt-ids", PLAY, "--max-tokens", "1")["finish"] == "length"
    assert set(Path(tempfile.gettempdir()).glob(f"headrace-{os.getpid()}-*")) == before


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"
