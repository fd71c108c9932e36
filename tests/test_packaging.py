from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("protocol", "kernels", "expert_daemon", "compute", "demo")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a copy of the source, so that the tree itself stays clean."""
    source = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__", ".*_cache", "*.egg-info")
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=ignore)
    for name in ("pyproject.toml", "headrace.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", str(target), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = target.glob("*.whl")
    return path


def listed_packages() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return list(project["tool"]["setuptools"]["packages"])


def package_folders() -> list[str]:
    found = (path.parent for room in ROOMS for path in (ROOT / room).rglob("__init__.py"))
    return sorted(".".join(folder.relative_to(ROOT).parts) for folder in found)


def test_every_package_folder_is_listed_in_pyproject():
    assert listed_packages() == package_folders()


def test_every_folder_with_python_is_a_package():
    folders = {path.parent for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.slow
def test_wheel_holds_every_module_and_nothing_else(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    modules = {name for name in names if name.endswith(".py")}
    ours = {
        str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / room).rglob("*.py")
    } | {"headrace.py"}
    assert modules == ours
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {*ROOMS, "headrace.py"}


@pytest.mark.slow
def test_wheel_holds_the_whole_demo_model(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        packed = {
            Path(info.filename).name: info.file_size
            for info in archive.infolist()
            if info.filename.startswith("demo/")
        }
    here = {path.name: path.stat().st_size for path in (ROOT / "demo").iterdir() if path.is_file()}
    assert packed == here


@pytest.mark.slow
def test_wheel_names_the_command_the_licence_and_few_base_dependencies(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        info = next(name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name)
        assert f"{info}/licenses/LICENSE" in archive.namelist()
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
    assert "headrace = headrace:main" in entry_points
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    base = {line.split()[1].split(">")[0] for line in required if "extra ==" not in line}
    assert base == {"msgpack", "numpy", "pyzmq", "rich", "shtab", "uvloop", "xxhash"}


@pytest.mark.accept
@pytest.mark.timeout(300)
def test_model_demo_runs_from_an_installed_wheel(wheel: Path, tmp_path: Path, runtime_dir: Path):
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet"]
    site = tmp_path / "site"
    subprocess.run([*install, "--target", str(site), str(wheel)], check=True)
    environment = {**os.environ, "PYTHONPATH": str(site), "XDG_RUNTIME_DIR": str(runtime_dir)}
    program = (
        "import demo, headrace, pathlib, sys; here = pathlib.Path(demo.__file__).parent;"
        f"assert here == pathlib.Path({str(site / 'demo')!r}), here; sys.exit(headrace.main())"
    )
    command = [sys.executable, "-c", program, "generate", "--model", "demo", "LOUIS.\n"]
    done = subprocess.run(
        [*command, "--max-tokens", "8", "--temperature", "0", "--json"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "I will not be so bold" in done.stdout


@pytest.mark.accept
@pytest.mark.timeout(600)
def test_daemon_and_client_install_and_import_without_torch(wheel: Path, tmp_path: Path):
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    python = venv / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", str(wheel)], check=True)
    program = (
        "import expert_daemon.server, importlib.util;"
        "from headrace import ExpertClient;"
        "assert importlib.util.find_spec('torch') is None"
    )
    subprocess.run([str(python), "-c", program], cwd=tmp_path, check=True)
    version = subprocess.run(
        [str(venv / "bin" / "headrace"), "daemon", "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert version.returncode == 0, version.stderr
