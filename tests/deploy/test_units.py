"""The units as systemd's own tools see them, and what they promise in words."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SERVICES = ("headrace-expertd", "headrace-compute", "headrace-frontend")
MODULES = ("expert_daemon", "compute", "compute.frontend")
WORST_EXPOSURE = 1.5  # as the README says

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="systemd-analyze is not installed (Debian package systemd)",
)


def settings_of(service: str) -> dict[str, list[str]]:
    """{directive: its values} of a unit's [Service]."""
    found: dict[str, list[str]] = {}
    text = (DEPLOY / "systemd" / f"{service}.service").read_text()
    for line in text.partition("[Service]")[2].partition("[Install]")[0].splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


@needs_systemd
def test_systemd_takes_the_units_without_a_word(tmp_path: Path):
    for unit in (DEPLOY / "systemd").glob("headrace*"):
        text = unit.read_text().replace("/opt/headrace/current/bin/python", sys.executable)
        (tmp_path / unit.name).write_text(text)
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, tmp_path.iterdir())],
        capture_output=True,
        text=True,
        env=os.environ | {"SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
        check=False,
    )
    words = [line for line in verified.stderr.splitlines() if "headrace" in line]
    assert words == []
    assert verified.returncode == 0


@needs_systemd
@pytest.mark.parametrize("service", SERVICES)
def test_a_service_is_exposed_no_more_than_the_readme_says(service: str):
    asked = subprocess.run(
        [
            *("systemd-analyze", "security", "--offline=true"),
            f"--threshold={WORST_EXPOSURE * 10:.0f}",
            str(DEPLOY / "systemd" / f"{service}.service"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if "offline" in asked.stderr:
        pytest.skip("this systemd-analyze cannot look at a unit offline")
    assert asked.returncode == 0, asked.stdout[-2000:] + asked.stderr
    assert f"{WORST_EXPOSURE}" in (DEPLOY / "README.md").read_text()


@pytest.mark.parametrize(("service", "module"), list(zip(SERVICES, MODULES, strict=True)))
def test_a_unit_runs_its_process_with_the_shared_settings(service: str, module: str):
    (command,) = settings_of(service)["ExecStart"]
    words = command.split()
    assert words[1:4] == ["-I", "-m", module]
    assert words[4:] == ["--config", "/etc/headrace/headrace.toml"]


@pytest.mark.parametrize("service", SERVICES)
def test_a_unit_is_watched_restarted_and_private(service: str):
    settings = settings_of(service)
    wanted = {
        "Type": "notify",
        "NotifyAccess": "main",
        "Restart": "on-failure",
        "KillMode": "mixed",
        "User": "headrace",
        "UMask": "0077",
        "RuntimeDirectory": "headrace",
        "RuntimeDirectoryMode": "0700",
        "RuntimeDirectoryPreserve": "yes",
        "NoNewPrivileges": "yes",
        "ProtectSystem": "strict",
        "LimitCORE": "0",
    }
    assert {name: settings.get(name) for name in wanted} == {k: [v] for k, v in wanted.items()}
    assert "WatchdogSec" in settings


def test_no_limit_of_memory_stands_below_an_arena():
    for service in ("headrace-expertd", "headrace-compute"):
        settings = settings_of(service)
        assert not {"MemoryMax", "MemoryHigh", "LimitAS", "LimitDATA"} & set(settings)
        assert settings["LimitMEMLOCK"] == ["infinity"]
        assert -1000 < int(settings["OOMScoreAdjust"][0]) < 0


def test_a_restarted_daemon_takes_nobody_down():
    text = (DEPLOY / "systemd" / "headrace-compute.service").read_text()
    assert "\nWants=headrace-expertd.service\nAfter=headrace-expertd.service\n" in text
    for service in SERVICES:
        unit = (DEPLOY / "systemd" / f"{service}.service").read_text()
        assert not re.search(r"^(Requires|BindsTo|Requisite)=", unit, re.MULTILINE)


def test_what_only_newer_managers_know_is_kept_apart():
    newer = ("FileDescriptorStorePreserve", "RestartSteps", "RestartMaxDelaySec")
    for service in SERVICES:
        assert not set(newer) & set(settings_of(service))
        drop_in = configparser.ConfigParser(interpolation=None)
        drop_in.read(DEPLOY / "systemd-254" / f"{service}.service.d" / "254.conf")
        names = {name.lower() for name in newer[0 if service == SERVICES[0] else 1 :]}
        assert set(drop_in["Service"]) == names


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="no systemd-sysusers here")
def test_sysusers_and_tmpfiles_take_their_files(tmp_path: Path):
    etc = tmp_path / "etc"
    etc.mkdir()
    (etc / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (etc / "group").write_text("root:x:0:\n")
    users = DEPLOY / "systemd" / "sysusers.d.conf"
    if os.geteuid() != 0:
        pytest.skip("making a user in a folder needs root")
    made = subprocess.run(
        ["systemd-sysusers", f"--root={tmp_path}", str(users)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert "headrace" in (etc / "passwd").read_text()
    files = (DEPLOY / "systemd" / "tmpfiles.d.conf").read_text().replace("w /sys", "#")
    (tmp_path / "headrace.conf").write_text(files)
    (tmp_path / "run").mkdir()
    made = subprocess.run(
        ["systemd-tmpfiles", f"--root={tmp_path}", "--create", str(tmp_path / "headrace.conf")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "run" / "headrace").stat().st_mode & 0o777 == 0o700
