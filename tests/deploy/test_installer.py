from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSTALLER = ROOT / "deploy" / "install.sh"


def install_files(dest: Path, systemd: str) -> None:
    environment = os.environ | {"DESTDIR": str(dest), "SYSTEMD_VERSION": systemd}
    subprocess.run([INSTALLER, "--files"], check=True, env=environment, capture_output=True)


def installed(dest: Path) -> set[str]:
    return {str(path.relative_to(dest)) for path in dest.rglob("*") if path.is_file()}


def test_files_go_where_systemd_looks(tmp_path: Path):
    install_files(tmp_path, "252")
    assert installed(tmp_path) == {
        "etc/headrace/headrace.toml",
        "etc/systemd/system/headrace.target",
        "etc/systemd/system/headrace-expertd.service",
        "etc/systemd/system/headrace-compute.service",
        "etc/systemd/system/headrace-frontend.service",
        "etc/sysusers.d/headrace.conf",
        "etc/tmpfiles.d/headrace.conf",
    }


def test_drop_ins_come_and_go_with_the_version(tmp_path: Path):
    install_files(tmp_path, "257")
    drop_ins = {name for name in installed(tmp_path) if name.endswith("254.conf")}
    assert len(drop_ins) == 3
    install_files(tmp_path, "249")
    assert not drop_ins & installed(tmp_path)


def test_settings_that_are_there_are_kept(tmp_path: Path):
    install_files(tmp_path, "252")
    file = tmp_path / "etc" / "headrace" / "headrace.toml"
    file.write_text('model = "mine"\n')
    install_files(tmp_path, "252")
    assert file.read_text() == 'model = "mine"\n'


def test_an_unknown_word_is_refused_with_the_help():
    asked = subprocess.run([INSTALLER, "--nonsense"], capture_output=True, text=True, check=False)
    assert asked.returncode == 2
    assert "--use RELEASE" in asked.stdout


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing():
    scripts = [INSTALLER, ROOT / "deploy" / "boot_test.sh"]
    checked = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False)
    assert checked.stdout == ""
