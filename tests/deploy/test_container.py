from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import headrace

ROOT = Path(__file__).resolve().parents[2]
CONTAINER = ROOT / "deploy" / "container"
DOCKERFILE = CONTAINER / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """(instruction, rest) of the Dockerfile, continued lines joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line]


def compose() -> dict[str, Any]:
    loaded = yaml.safe_load((CONTAINER / "compose.yaml").read_text())
    assert isinstance(loaded, dict)
    return loaded


def test_hadolint_finds_nothing():
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which(
        "hadolint"
    )
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    linted = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False)
    assert linted.stdout == ""


def test_every_base_has_a_tag_and_every_copied_path_exists():
    for name, rest in instructions():
        if name == "FROM":
            assert ":" in rest.split()[0]
            assert not rest.split()[0].endswith(":latest")
        if name == "COPY" and not rest.startswith("--from"):
            assert (ROOT / rest.split()[0]).exists()


def test_the_container_runs_as_nobody_in_particular():
    users = [rest for name, rest in instructions() if name == "USER"]
    assert users == ["10001:10001"]


def test_the_container_starts_a_command_that_exists():
    found = dict(instructions())
    command = json.loads(found["ENTRYPOINT"]) + json.loads(found["CMD"])
    args = headrace.build_parser(["serve"]).parse_args(command[1:])
    assert (command[0], args.command, args.runtime_dir) == ("headrace", "serve", "/run/headrace")


def test_the_health_check_is_a_program():
    (check,) = [rest for name, rest in instructions() if name == "HEALTHCHECK"]
    program = json.loads(check.partition("CMD ")[2])
    compile(program[2], "healthcheck", "exec")


def test_compose_gives_flags_that_serve_knows():
    command = compose()["services"]["headrace"]["command"]
    words = [word.replace("${MODEL:+/models/}${MODEL:-demo}", "demo") for word in command]
    words = [word.replace("${ARENA:?name a size such as 96GiB}", "96GiB") for word in words]
    args = headrace.build_parser(["serve"]).parse_args(words)
    assert (args.model, args.arena, args.host) == ("demo", "96GiB", "0.0.0.0")
    assert args.token_file == "/run/secrets/tokens"


def test_compose_builds_from_where_the_dockerfile_copies():
    build = compose()["services"]["headrace"]["build"]
    context = (CONTAINER / build["context"]).resolve()
    assert context == ROOT
    assert (context / build["dockerfile"]) == DOCKERFILE


def test_compose_opens_nothing_to_other_machines():
    service = compose()["services"]["headrace"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True
    assert service["tmpfs"][0] == "/run/headrace:mode=0700,uid=10001,gid=10001"


def test_nothing_of_a_work_tree_gets_into_the_image():
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "tests"} <= set(ignored)
    assert not {"compute", "protocol", "expert_daemon", "kernels", "demo", "README.md"} & set(
        ignored
    )
