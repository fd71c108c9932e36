"""Every command of the pages is run here, or named with the reason why not.

A line of a block marked `sh` is looked up as it stands. Those of RUN run in a shell, with the
released model's folder replaced by the demo's. Commands inside sentences are held to the parsers:
the subcommand and its flags must exist.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from tests.support.serving import serving

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "deploy/README.md",
    "demo/README.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
]
BLOCK = re.compile(r"^ *```sh\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`((?:sudo |python -m )?headrace [a-z][^`]*)`")
MODEL = "/data/DeepSeek-V4.1-Flash"

RUN = {
    f"headrace inspect {MODEL}",
    f"headrace generate --model {MODEL} 'Once upon a time'",
    f"headrace plan --model {MODEL}",
    f"headrace doctor --model {MODEL}",
}
# Command, or how it begins -> why it is not run here; a test file is where it runs.
NOT_RUN = {
    "make test": "runs this test",
    "make demo": "a set-up from a package registry; what it then runs is run below",
    "make ": "tests/test_repository.py",
    f"headrace daemon --model {MODEL}": "tests/integration/test_daemon_lifecycle.py",
    "headrace daemon --model MODEL --metrics": "tests/integration/test_metrics.py",
    "headrace serve --model demo": "run below, with the request that follows it",
    "curl http://127.0.0.1:8080/v1/": "run below, without curl",
    f"headrace bench --model {MODEL}": "tests/compute/commands/bench/test_bench_command.py",
    f"headrace plan --model {MODEL} --bench": "tests/compute/commands/bench/test_bench_command.py",
    "headrace verify --runtime": "tests/integration/test_verify_runtime.py",
    "headrace generate --model MODEL --predict-trace": "tests/integration/test_graph_flags.py",
    "headrace simulate --predictions": "tests/integration/test_graph_flags.py",
    "sudo apt-get ": "needs root and a package registry; deploy/boot_test.sh does the same",
    "git ": "needs the place where this repository is hosted",
    "sudo headrace/deploy/install.sh": "deploy/boot_test.sh, and tests/deploy/test_installer.py",
    "sudo systemctl ": "needs root and systemd as the first process; deploy/boot_test.sh",
    "systemctl status": "as above",
    "journalctl ": "as above",
    "sudoedit ": "asks a person",
    "sudo -u headrace headrace doctor": "tests/compute/commands/doctor/test_doctor.py",
    "ls /opt/headrace": "needs an installation; deploy/boot_test.sh",
    "sudo rm -r ": "removes an installation",
    "head -c 32 /dev/urandom": "needs the user of an installation",
    "docker build ": "no container can be built where tests run; tests/deploy/test_container.py",
    "MODELS=": "as above; tests/deploy/test_container.py reads the compose file",
}


def lines_of(page: str) -> list[str]:
    """Every command line of a page's blocks, without comments, continued lines joined."""
    found = []
    for block in BLOCK.findall((ROOT / page).read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            text = re.sub(r"\s+#\s.*$", "", line).strip()
            if text and not text.startswith("#"):
                found.append(text)
    return found


def all_lines() -> list[str]:
    return [line for page in PAGES for line in lines_of(page)]


def test_every_command_is_run_or_excused():
    for page in PAGES:
        for line in lines_of(page):
            excused = [start for start in NOT_RUN if line.startswith(start)]
            assert line in RUN or excused, f"{page}: {line!r} is neither run nor excused"


def test_nothing_is_excused_or_listed_that_no_page_has():
    lines = all_lines()
    assert {
        start for start in NOT_RUN if not any(line.startswith(start) for line in lines)
    } == set()
    assert RUN - set(lines) == set()


def test_a_reason_that_names_a_file_names_one_that_exists():
    for reason in NOT_RUN.values():
        for name in re.findall(r"[\w./]+\.(?:py|sh)\b", reason):
            assert (ROOT / name).is_file(), name


def test_no_block_without_a_language_holds_a_command():
    starts = ("headrace ", "sudo ", "make ", "pip ", "docker ")
    for page in PAGES:
        language: str | None = None  # of the block that we are in
        for line in (ROOT / page).read_text().splitlines():
            if line.strip().startswith("```"):
                language = line.strip()[3:] if language is None else None
            elif language == "":
                assert not line.startswith(starts), f"{page}: mark the block sh: {line!r}"


@pytest.mark.parametrize("line", sorted(RUN))
def test_a_command_of_the_pages_runs(line: str, runtime_dir: Path, tmp_path: Path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_RUNTIME_DIR": str(runtime_dir),
        "HEADRACE_MAX_TOKENS": "4",
        "HOME": str(tmp_path),
    }
    done = subprocess.run(
        ["bash", "-euc", line.replace(MODEL, str(ROOT / "demo"))],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode in ((0, 1) if "doctor" in line else (0,)), done.stderr
    assert done.stdout


@pytest.mark.slow
def test_the_readmes_server_answers_the_request_that_follows_it(runtime_dir: Path):
    """`headrace serve --model demo`, then what the pages ask of it with curl."""
    asked = [line for line in all_lines() if line.startswith("curl ")]
    assert asked
    with serving(runtime_dir) as served:
        for line in dict.fromkeys(asked):
            url, body = re.fullmatch(r"curl (\S+)(?: -d '(.*)')?", line).groups()  # type: ignore[union-attr]
            path = url.removeprefix("http://127.0.0.1:8080")
            answer = served.ask(path, None if body is None else body.encode())
            assert answer.status == 200, answer.body


def flags_of(command: str) -> set[str]:
    """The flags of a subcommand and of what it has below."""
    if command == "daemon":
        from expert_daemon.config import OPTIONS

        return {"--" + name.replace("_", "-") for name in OPTIONS} | {"--help", "--config"}
    parser = headrace.build_parser([command])
    (subparsers,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    found, open_ = set(), [subparsers.choices[command]]
    while open_:
        for action in open_.pop()._actions:
            found |= set(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                open_ += action.choices.values()
    return found


@pytest.mark.parametrize("page", PAGES)
def test_commands_inside_sentences_exist_with_their_flags(page: str):
    for text in INLINE.findall((ROOT / page).read_text()):
        words = text.split()
        command = words[words.index("headrace") + 1]
        assert command in headrace.COMMANDS, f"{page}: {text}"
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert flags <= flags_of(command), f"{page}: {text}"
