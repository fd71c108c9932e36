from __future__ import annotations

import re
from pathlib import Path

import pytest

import headrace
from compute.config import ComputeConfig
from tests.support.running_daemon import daemon_process

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_readme_names_every_command_and_no_other():
    named = set(re.findall(r"`headrace ([a-z]+)", README))
    assert named == set(headrace.COMMANDS)


def test_readme_program_runs(demo_dir: Path, runtime_dir: Path, capsys: pytest.CaptureFixture[str]):
    (program,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert program.count("/run/headrace") == 1
    program = program.replace("/run/headrace", str(runtime_dir))
    with daemon_process(demo_dir, runtime_dir):
        exec(program, {})
    assert capsys.readouterr().out.split() == ["8192"] * 3


def test_readme_says_from_where_a_request_goes_on():
    assert f"States are kept every `--chunk` ({ComputeConfig().chunk}) tokens" in README
    assert f"the same prompt of up to {ComputeConfig().chunk} tokens\nagain is computed" in README


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "deploy/README.md",
        *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
    ],
)
def test_links_of_the_pages_lead_somewhere(page: str):
    folder = (ROOT / page).parent
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text())
    assert [link for link in links if not (folder / link).exists()] == []
