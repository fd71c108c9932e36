from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import headrace
from compute.config import COMPUTE_OPTIONS
from compute.frontend.config import FRONTEND_OPTIONS
from expert_daemon.config import OPTIONS
from protocol.setting_names import SETTING_NAMES

ROOT = Path(__file__).resolve().parents[1]


def _run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "headrace.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,  # type: ignore[call-overload]
    )


def test_importing_headrace_imports_neither_torch_nor_a_room() -> None:
    code = (
        "import sys, headrace; headrace.ExpertClient\n"
        "assert headrace.ExpertClient.__module__ == 'protocol.wire.client'\n"
        "raise SystemExit(any(name in sys.modules for name in ('torch', 'compute', 'rich')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_an_unknown_name_of_the_module_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'ExpertServer'"):
        _ = headrace.ExpertServer


def test_the_version_is_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert headrace.__version__ == project["version"]
    assert _run("--version").stdout == f"headrace {project['version']}\n"


def test_help_names_every_command_and_imports_none() -> None:
    shown = _run("--help").stdout
    assert all(command in shown for command in headrace.COMMANDS)


def test_without_a_command_the_commands_are_named() -> None:
    done = _run()
    assert done.returncode == 2
    assert done.stdout == ""
    named = [line.split()[0] for line in done.stderr.splitlines() if line.strip()]
    assert set(headrace.COMMANDS) <= set(named)


@pytest.mark.parametrize("command", sorted(headrace.COMMANDS))
def test_each_commands_flags_load_without_torch(command: str) -> None:
    code = (
        f"import sys, headrace; headrace.build_parser([{command!r}])\n"
        "raise SystemExit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_and_flags(shell: str) -> None:
    script = _run("completion", shell).stdout
    assert "generate" in script
    assert "prompt-ids" in script


def test_an_error_is_one_line_and_a_status() -> None:
    done = _run("generate", "--model", "/nowhere", "--prompt-ids", "1")
    assert done.returncode == 2
    assert done.stderr.startswith("headrace: model '/nowhere': no such directory")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize("model_type", ["deepseek_v4", "llama"])
def test_an_unknown_model_type_is_refused_before_torch_is_imported(
    tmp_path: Path, model_type: str
) -> None:
    config = json.loads((ROOT / "demo" / "config.json").read_text())
    config["model_type"] = model_type
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = (
        "import sys, headrace\n"
        f"status = headrace.main(['generate', '--model', {str(tmp_path)!r}, '--prompt-ids', '1'])\n"
        "assert 'torch' not in sys.modules\n"
        "raise SystemExit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert model_type in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-ids", "1,x"], "--prompt-ids: '1,x' is not a list"),
        (["--prompt-ids", "1", "and a text"], "both a prompt and --prompt-ids"),
        (["--prompt-ids", "1", "--temperature", "-2"], "--temperature"),
        (["--prompt-ids", "1", "--stop", ""], "--stop: a stop string is empty"),
        (["--prompt-ids", "1", "--runtime-dir", "/" + "x" * 120], "may have 100"),
        (["--prompt-ids", "1", "--device", "tpu"], "--device"),
    ],
)
def test_wrong_flags_are_named(arguments: list[str], message: str) -> None:
    done = _run("generate", *arguments)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("redirection", "status", "message"),
    [
        (">/dev/full", 1, "headrace: [Errno 28]"),
        (">&-", 0, ""),
        ("<&- >/dev/null", 0, ""),
        (">&- <&- 2>&-", 0, ""),
    ],
)
def test_streams_that_are_closed_or_full_end_in_no_traceback(
    redirection: str, status: int, message: str
) -> None:
    command = f"{sys.executable} headrace.py inspect demo --json {redirection}"
    done = subprocess.run(
        ["/bin/sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert message in done.stderr


@pytest.mark.parametrize("path", ["/etc/passwd", "/proc/nope"])
def test_a_runtime_directory_that_cannot_be_made_is_named(path: str) -> None:
    done = _run("generate", "KING", "--runtime-dir", path)
    assert done.returncode in {1, 2}
    assert path in done.stderr
    assert "Traceback" not in done.stderr


_BARE = """
import json, sys
import headrace

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NOT_IN_THE_BASE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

NOT_IN_THE_BASE = set(json.loads(sys.argv[1]))
sys.meta_path.insert(0, Missing())
raise SystemExit(headrace.main(sys.argv[2:]))
"""
_NOT_IN_THE_BASE = [
    "torch",
    "triton",
    "tokenizers",
    "starlette",
    "uvicorn",
    "h11",
    "jinja2",
    "prometheus_client",
]
_NOT_IN_THE_BASE += ["llguidance", "deepseek_recipe", "matplotlib"]


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("completion bash", 0),
        ("inspect demo", 0),
        ("verify demo --state-dir {}", 0),
        ("tune demo --no-save --seconds 0.1", 0),
        ("simulate --synthetic flat --tokens 20", 0),
        ("plan --model demo", 0),
        ("cache --runtime-dir {}", 1),
        ("top --once --url http://127.0.0.1:9", 1),
    ],
)
def test_what_runs_no_model_runs_in_the_base_install(
    command: str, status: int, tmp_path: Path
) -> None:
    arguments = command.format(tmp_path).split()
    done = subprocess.run(
        [sys.executable, "-c", _BARE, json.dumps(_NOT_IN_THE_BASE), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "missing" not in done.stderr
    assert done.returncode == status, done.stderr
    if status:  # there is neither a daemon nor a server
        assert "answers" in done.stderr


def test_a_variable_that_no_setting_has_is_told_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("HEADRACE_MODEL", "HEADRACE_ARENA", "HEADRACE_CONFIG", "HEADRACE_HOST"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("HEADRACE_MODLE", "demo")
    monkeypatch.setenv("HEADRACE_XYZZY", "1")
    assert headrace.main(["inspect", "demo", "--json"]) == 0
    told = "no setting has this name, it is ignored"
    assert capsys.readouterr().err.splitlines() == [
        f"headrace: HEADRACE_MODLE: {told}; is HEADRACE_MODEL meant?",
        f"headrace: HEADRACE_XYZZY: {told}; docs/settings.md has them all",
    ]


def test_each_service_tells_of_a_variable_that_no_setting_has(tmp_path: Path) -> None:
    bad = {"HEADRACE_ARENA": "x", "HEADRACE_CONTEXT": "x", "HEADRACE_PORT": "x"}  # ends each
    environment = os.environ | bad | {"HEADRACE_ARENNA": "1GiB"}
    told = "HEADRACE_ARENNA: no setting has this name, it is ignored; is HEADRACE_ARENA meant?"
    for module in ("expert_daemon", "compute", "compute.frontend"):
        done = subprocess.run(
            [sys.executable, "-m", module, "--runtime-dir", str(tmp_path)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode, module
        assert told in done.stderr, (module, done.stderr)


def test_names_of_settings_are_those_of_all_processes() -> None:
    of_compute = [*COMPUTE_OPTIONS.items(), *FRONTEND_OPTIONS.items()]
    names = {name.upper() for name, option in of_compute if option.has_flag}
    assert {"CONFIG"} | names | {name.upper() for name in OPTIONS} == SETTING_NAMES


def test_a_missing_package_is_named_with_what_brings_it() -> None:
    code = (
        "import sys, headrace\n"
        "sys.modules['tokenizers'] = None\n"
        "raise SystemExit(headrace.main(['generate', 'KING']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == (
        "headrace: the package tokenizers is missing: pip install '.[compute]' in the clone\n"
    )


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("pack a b", ("--stripe", "--layers", "--mirror", "--device")),
        ("verify demo", ("--state-dir",)),
        ("tune demo", ("--state-dir",)),
        ("simulate --synthetic flat", ("--arena", "--policy", "--device", "--write", "--plot")),
        ("generate", ("--prompt-ids", "--arena", "--device")),
        ("plan --model demo", ("--arena", "--trace", "--memory", "--bench")),
        ("bench", ("--report", "--from", "--compare")),
        ("doctor", ("--model", "--runtime-dir")),
        ("cache", ("--runtime-dir",)),
    ],
)
def test_a_value_that_is_empty_is_refused(
    command: str, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    for flag in flags:
        assert headrace.main([*command.split(), flag, ""]) == 2
        assert capsys.readouterr().err.startswith(f"headrace: {flag}: '' is empty, wanted ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("pack demo b --stripe x,,y", "--stripe: part 2 of 'x,,y' is empty"),
        ("pack demo b --layers 0,,1", "--layers: part 2 of '0,,1' is empty"),
        ("simulate --synthetic flat --tokens 1 --arena 10%,,20%", "--arena: part 2 of "),
        ("simulate --synthetic flat --tokens 1 --policy lru,", "--policy: part 2 of "),
        ("generate --model demo --prompt-ids 1,,2", "--prompt-ids: part 2 of '1,,2' is empty"),
    ],
)
def test_a_part_of_a_list_that_is_empty_is_refused(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert headrace.main(arguments.split()) == 2
    assert capsys.readouterr().err.startswith(f"headrace: {message}")
