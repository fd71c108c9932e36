"""Run compute-sanitizer's memcheck, then racecheck, over the tour of all kernels.

    python tests/support/sanitize.py [--kernel NAME ...] [--jobs N] [--keep DIR]

Prints a line for each kernel: what each tool found in how many launches. First each tool must find
an error that was planted: else nothing that it does not find says anything. The tour runs once by
itself, so that no kernel is compiled under a tool, then in N processes at a time; `--keep` leaves
what the tools said in DIR. Exit status 1: something was found, or a run did not end; 2: there is no
compute-sanitizer here, or it or the tour does not run here.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

TOUR = Path(__file__).with_name("kernel_tour.py")
TOOLS = {"memcheck": ("error", "errors"), "racecheck": ("hazard", "hazards")}
SECONDS = 900  # of one process
# Torch's own kernels are not ours to check; calls that fail end the tour by themselves.
OPTIONS = (
    "--target-processes", "application-only", "--launch-timeout", "120",
    "--kernel-name-exclude", "kns=2at6native", "--show-backtrace", "device", "--print-limit", "500",
    "--destroy-on-device-error", "kernel",
)  # fmt: skip
# Room between allocations, so that what is far behind one is not inside the next.
OWN_OPTIONS = {
    "memcheck": ("--padding", "65536", "--report-api-errors", "no"),
    "racecheck": ("--racecheck-report", "analysis"),
}
NONE = "(no kernel)"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a tool said of one process."""

    launches: Counter[str]  # by kernel
    found: Counter[str]  # by kernel: messages about it
    trouble: str  # why the run says nothing, "" where it ended
    text: str


def compute_sanitizer() -> str | None:
    """Return the program, None where there is none."""
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )


def parts_of(kernels: Iterable[str], groups: dict[str, object], n: int) -> list[list[str]]:
    """Return the kernels in n parts or more, in none of which two functions share their name.

    groups  what launches each kernel: kernels that it launches together stay together
    """
    together: dict[object, list[str]] = {}
    for kernel in kernels:
        together.setdefault(groups[kernel], []).append(kernel)
    parts: list[list[str]] = [[] for _ in range(n)]
    for group in together.values():
        names = {kernel.partition(".")[2] for kernel in group}
        free = [part for part in parts if not names & {one.partition(".")[2] for one in part}]
        if not free:
            parts.append([])
            free = parts[-1:]
        min(free, key=len).extend(group)
    return [part for part in parts if part]


def messages(text: str) -> tuple[list[str], int | None]:
    """Return the messages of a tool's output and the number that it sums them up to, None: none."""
    found: list[str] = []
    for line in text.splitlines():
        body = line.removeprefix("=========")
        if body == line or not body.strip() or "SUMMARY:" in body:
            continue
        if body.startswith("  ") and found:
            found[-1] += "\n" + body.strip()
        elif body.strip() != "COMPUTE-SANITIZER":
            found.append(body.strip())
    total = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
    return found, int(total[1]) if total else None


def outcome(text: str, printed: str, kernels: Iterable[str], status: int) -> Outcome:
    """Return what a tool's output and the tour's lines say.

    kernels  that may be spoken of; of those whose functions share their name the last one is
    """
    launches = Counter(line.split(" ")[0] for line in printed.splitlines() if " grid " in line)
    by_function = {kernel.partition(".")[2]: kernel for kernel in kernels}
    said, total = messages(text)
    found: Counter[str] = Counter()
    for message in said:
        named = [word for word in re.findall(r"\w+", message) if word in by_function]
        if named:
            found[by_function[named[0]]] += 1
    trouble = ""
    if total is None:
        trouble = said[0].splitlines()[0] if said else "the tool said nothing"
    elif total > found.total():
        found[NONE] = total - found.total()
    if not trouble and status:
        trouble = f"the tour ended with status {status}"
    return Outcome(launches, found, trouble, text)


def watched(tool: str, number: int, kernels: Iterable[str], tour: Sequence[str]) -> Outcome:
    """Run the tour under a tool; processes that run at the same time have different numbers."""
    program = compute_sanitizer()
    assert program is not None
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [
            program, "--tool", tool, *OPTIONS, *OWN_OPTIONS[tool], "--log-file", str(log),
            "--port", str(49152 + 16 * number), sys.executable, str(TOUR), *tour,
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return Outcome(Counter(), Counter(), f"a process did not end in {SECONDS} s", "")
        text = log.read_text(errors="replace") if log.exists() else ""
    found = outcome(text, done.stdout, kernels, done.returncode)
    return replace(found, text=text + done.stderr)


def by_itself(tour: Sequence[str]) -> str:
    """Run the tour without a tool; return why it does not run here, "" where it does."""
    command = [sys.executable, str(TOUR), *tour]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if not done.returncode:
        return ""
    said = done.stderr.strip() or f"exit status {done.returncode}"
    return f"the tour does not run here: {said.splitlines()[-1]}"


def line_of(kernel: str, outcomes: dict[str, list[Outcome]]) -> tuple[str, bool]:
    """Return the line about a kernel, and whether all is well with it."""
    said, well = [], True
    for tool, runs in outcomes.items():
        launches = sum(run.launches[kernel] for run in runs)
        found = sum(run.found[kernel] for run in runs)
        well = well and launches > 0 and not found
        said.append(f"{tool} {found} {TOOLS[tool][found != 1]} in {launches} launches")
    return f"{kernel}: {', '.join(said)}", well


def report(kernels: Sequence[str], outcomes: dict[str, list[Outcome]]) -> int:
    """Print a line for each kernel and for whatever else was said; return the exit status."""
    wrong = 0
    for kernel in kernels:
        line, well = line_of(kernel, outcomes)
        print(line)
        wrong += not well
    for tool, runs in outcomes.items():
        for run in runs:
            if run.trouble or run.found[NONE]:
                wrong += 1
                print(f"{tool}: {run.trouble or f'{run.found[NONE]} beside the kernels'}")
    print(f"{len(kernels)} kernels, {wrong or 'nothing'} to look into")
    return int(wrong > 0)


def without_a_tool(tool: str, planted: str, run: Outcome) -> str:
    """Return why what a tool does not find says nothing, "" where it found what was planted."""
    if run.found[planted]:
        return ""
    said = messages(run.text)[0]
    why = said[0].splitlines()[0] if said else "it does not find an error that was planted"
    return f"{tool} does not run here: {run.trouble or why}"


def main(arguments: Sequence[str]) -> int:
    """Do what the module's docstring says."""
    parser = argparse.ArgumentParser(description="compute-sanitizer over all kernels")
    parser.add_argument("--kernel", action="append", default=[], metavar="NAME")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), metavar="N")
    parser.add_argument("--keep", type=Path, metavar="DIR")
    asked = parser.parse_args(arguments)
    if compute_sanitizer() is None:
        print("no compute-sanitizer here: it comes with NVIDIA's CUDA toolkit", file=sys.stderr)
        return 2
    sys.path.insert(0, str(TOUR.parents[2]))
    from tests.support.kernel_stops import STOPS
    from tests.support.kernel_tour import chosen
    from tests.support.planted_errors import PLANTED

    kernels = chosen(asked.kernel)
    parts = parts_of(kernels, dict(STOPS), asked.jobs)
    tours = [[word for kernel in part for word in ("--kernel", kernel)] for part in parts]
    spoken_of = [[*STOPS, *part] for part in parts]
    outcomes: dict[str, list[Outcome]] = {}
    with ThreadPoolExecutor(asked.jobs) as pool:
        why = next(filter(None, pool.map(by_itself, tours)), "")
        for tool in () if why else TOOLS:
            planted = PLANTED[tool][0]
            first = watched(tool, 0, [planted], ["--planted", tool])
            if why := without_a_tool(tool, planted, first):
                break
            runs = list(pool.map(partial(watched, tool), range(len(parts)), spoken_of, tours))
            outcomes[tool] = runs
            if asked.keep:
                text = "\n".join(run.text for run in [first, *runs])
                (asked.keep / f"{tool}.txt").write_text(text)
    if why:
        print(why, file=sys.stderr)
        return 2
    return report(kernels, outcomes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
