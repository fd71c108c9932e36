"""compute-sanitizer over the tour of kernels: what is made of its words, and of its absence."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support import sanitize
from tests.support.kernel_stops import STOPS

ROOT = Path(__file__).resolve().parents[2]
MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at turn_pairs+0x2d0 in turn_pairs.py:20
=========     by thread (0,0,0) in block (0,0,0)
=========     Access to 0x7f0000000018 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f0000000000 of size 24 bytes
=========         Device Frame: _gemv_kernel+0x2c0 in gemv.py:45
=========
========= Invalid __global__ write of size 2 bytes
=========     at _attend_kernel+0x10 in attend_sparse.py:9
=========     by thread (1,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at _merge_kernel+0x80 in attend_sparse.py:7
=========     and Read access at _merge_kernel+0x120 in attend_sparse.py:9 [128 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
KERNELS = [
    "gemv_layouts._gemv_kernel",
    "attend_sparse._attend_kernel",
    "attend_sparse._merge_kernel",
    "gemv._gemv_kernel",
]
PRINTED = "gemv._gemv_kernel grid (3, 1)\ngemv._gemv_kernel grid (3, 8)\n"


def test_errors_are_the_kernels_that_they_name() -> None:
    found = sanitize.outcome(MEMCHECK, PRINTED, KERNELS, 0)
    assert found.found == {"gemv._gemv_kernel": 1, "attend_sparse._attend_kernel": 1}
    assert found.launches == {"gemv._gemv_kernel": 2}
    assert found.trouble == ""
    hazards = sanitize.outcome(RACECHECK, PRINTED, KERNELS, 0)
    assert hazards.found == {"attend_sparse._merge_kernel": 1}


def test_what_names_no_kernel_is_counted_beside_them() -> None:
    text = MEMCHECK.replace("2 errors", "5 errors")
    assert sanitize.outcome(text, PRINTED, KERNELS, 0).found[sanitize.NONE] == 3
    assert sanitize.outcome(text, PRINTED, KERNELS[1:], 0).found[sanitize.NONE] == 3


def test_a_run_that_did_not_end_says_nothing() -> None:
    assert sanitize.outcome("", PRINTED, KERNELS, 0).trouble == "the tool said nothing"
    text = "========= COMPUTE-SANITIZER\n========= Error: Device not supported.\n"
    assert sanitize.outcome(text, "", KERNELS, 1).trouble == "Error: Device not supported."
    text = "========= ERROR SUMMARY: 0 errors\n"
    assert sanitize.outcome(text, "", KERNELS, 1).trouble == "the tour ended with status 1"


def test_no_part_has_two_functions_of_one_name() -> None:
    for n in (1, 3, 8):
        parts = sanitize.parts_of(STOPS, dict(STOPS), n)
        assert sorted(kernel for part in parts for kernel in part) == sorted(STOPS)
        for part in parts:
            assert len({kernel.partition(".")[2] for kernel in part}) == len(part)
        of = {kernel: number for number, part in enumerate(parts) for kernel in part}
        assert all(of[a] == of[b] for a in STOPS for b in STOPS if STOPS[a] is STOPS[b])


def test_each_kernel_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    clean = sanitize.Outcome(Counter({"a.b": 2}), Counter(), "", "")
    assert sanitize.report(["a.b"], {"memcheck": [clean], "racecheck": [clean]}) == 0
    said = "a.b: memcheck 0 errors in 2 launches, racecheck 0 hazards in 2 launches\n"
    assert capsys.readouterr().out == said + "1 kernels, nothing to look into\n"
    hazard = sanitize.Outcome(Counter({"a.b": 2}), Counter({"a.b": 1}), "", "")
    assert sanitize.report(["a.b"], {"memcheck": [clean], "racecheck": [clean, hazard]}) == 1
    assert "racecheck 1 hazard in 4 launches" in capsys.readouterr().out
    assert sanitize.report(["a.b", "a.c"], {"memcheck": [clean]}) == 1  # never launched
    assert "a.c: memcheck 0 errors in 0 launches\n" in capsys.readouterr().out
    lost = sanitize.Outcome(Counter({"a.b": 2}), Counter(), "it broke", "")
    assert sanitize.report(["a.b"], {"memcheck": [lost]}) == 1
    assert "memcheck: it broke\n" in capsys.readouterr().out


# What stands for the tour, and for the program.
TOUR = """
import sys
names = [word for word in sys.argv[1:] if "." in word]
print(*(f"{name} grid (1,)" for name in names), sep="\\n")
"""
PROGRAM = """#!{python}
import subprocess, sys
words = sys.argv[1:]
tool, log = words[words.index("--tool") + 1], words[words.index("--log-file") + 1]
start = words.index({python!r})
planted = {{"memcheck": "read_beyond_kernel", "racecheck": "race_kernel"}}
found = planted[tool] if "--planted" in words and tool not in {blind!r} else ""
summary = "RACECHECK SUMMARY: " if tool == "racecheck" else "ERROR SUMMARY: "
with open(log, "w") as file:
    print("========= COMPUTE-SANITIZER", file=file)
    if found:
        print(f"========= Error: at {{found}}+0x10", file=file)
    print(f"========= {{summary}}{{int(bool(found))}} errors", file=file)
sys.exit(subprocess.run(words[start:]).returncode)
"""


def run_with_stand_ins(
    folder: Path, monkeypatch: pytest.MonkeyPatch, blind: str, *arguments: str
) -> int:
    stand_in = folder / "compute-sanitizer"
    stand_in.write_text(PROGRAM.format(python=sys.executable, blind=blind))
    stand_in.chmod(0o755)
    (folder / "tour.py").write_text(TOUR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(sanitize, "TOUR", folder / "tour.py")
    return sanitize.main(["--jobs", "2", *arguments])


def test_every_kernel_is_watched_by_both_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = ["--keep", str(tmp_path)]
    status = run_with_stand_ins(
        tmp_path, monkeypatch, "", "--kernel", "gemv", "--kernel", "hc_mix", *kept
    )
    clean = "memcheck 0 errors in 1 launches, racecheck 0 hazards in 1 launches"
    names = ["gemv._gemv_kernel", "hc_mix._hc_mix_dot_kernel", "hc_mix._hc_mix_finish_kernel"]
    lines = [*(f"{name}: {clean}" for name in names), "3 kernels, nothing to look into"]
    assert capsys.readouterr().out.splitlines() == lines
    assert status == 0
    assert "read_beyond_kernel" in (tmp_path / "memcheck.txt").read_text()
    assert "race_kernel" in (tmp_path / "racecheck.txt").read_text()


def test_a_tool_that_finds_nothing_planted_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with_stand_ins(tmp_path, monkeypatch, "racecheck", "--kernel", "gemv") == 2
    said = "racecheck does not run here: it does not find an error that was planted\n"
    assert capsys.readouterr().err == said


def run_with(path: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tests/support/sanitize.py"), "--kernel", "gemv"]
    environment = {**os.environ, "PATH": path}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=90, env=environment, check=False
    )


@pytest.mark.skipif(Path("/usr/local/cuda/bin/compute-sanitizer").exists(), reason="it is here")
def test_without_the_program_one_line_says_so(tmp_path: Path) -> None:
    done = run_with(str(tmp_path))
    said = "no compute-sanitizer here: it comes with NVIDIA's CUDA toolkit\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there may be a GPU here")
def test_without_a_device_one_line_says_so(tmp_path: Path) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    done = run_with(f"{tmp_path}:{os.environ['PATH']}")
    assert (done.returncode, done.stdout) == (2, "")
    said = "the tour does not run here: no CUDA device here: kernels are launched on one\n"
    assert done.stderr == said
