"""Python, and the packages that the processes need. Imports none of them: that takes seconds."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from compute.commands.gpu_facts import GpuFacts
from protocol.wording import to_install

from .check import Check, Host

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
OLDEST_TRITON = (3, 6)
OLDEST_DRIVER = {12: 525, 13: 580}  # by the CUDA major that torch was built for
_NEEDED = ("numpy", "pyzmq", "msgpack", "uvloop", "xxhash", "rich")
_FOR_COMPUTE = ("tokenizers",)
_FOR_SERVING = ("uvicorn", "starlette", "prometheus-client")


def installed(name: str) -> str | None:
    """Return a distribution's version, None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def software(host: Host, gpus: tuple[GpuFacts, ...]) -> Iterator[Check]:
    """Yield the checks of Python and packages."""
    yield _python(sys.version_info[:3])
    yield _packages(host, "packages of the daemon", _NEEDED, to_install(), "error")
    compute = to_install("compute")
    yield _packages(host, "packages of compute", _FOR_COMPUTE, compute, "error")
    yield _packages(host, "packages of the server", _FOR_SERVING, to_install("serve"), "note")
    yield torch_check(host.distributions("torch"), torch_cuda(), gpus)
    yield _triton(host.distributions("triton"), gpus)


def _python(version: tuple[int, ...]) -> Check:
    found = ".".join(map(str, version))
    wanted = ".".join(map(str, OLDEST_PYTHON)) + " or newer"
    if version < OLDEST_PYTHON:
        fix = "install a newer Python and make the virtual environment with it"
        return Check("python", "error", found, wanted, fix)
    return Check("python", "ok", found, wanted)


def _packages(host: Host, name: str, wanted: tuple[str, ...], fix: str, status: str) -> Check:
    missing = [package for package in wanted if host.distributions(package) is None]
    if missing:
        return Check(name, status, f"missing: {', '.join(missing)}", ", ".join(wanted), fix)
    found = ", ".join(f"{package} {host.distributions(package)}" for package in wanted)
    return Check(name, "ok", found, ", ".join(wanted))


def torch_cuda() -> str | None:
    """Return the CUDA version that the installed torch was built for, None for a CPU build."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        try:
            text = (Path(folder) / "version.py").read_text(encoding="utf-8")
        except OSError:
            continue
        match = re.search(r"^cuda\b[^=\n]*=\s*'([0-9.]+)'", text, re.MULTILINE)
        return match[1] if match else None
    return None


def torch_check(version: str | None, cuda: str | None, gpus: tuple[GpuFacts, ...]) -> Check:
    """Return what torch is, and whether it is the build for this machine."""
    wanted = f"{_dotted(OLDEST_TORCH)} or newer" + (", built for CUDA" if gpus else "")
    fix = to_install("compute")
    if version is None:
        return Check("torch", "error", "missing", wanted, fix)
    found = f"{version}, for " + (f"CUDA {cuda}" if cuda else "the CPU")
    if _numbers(version) < OLDEST_TORCH:
        return Check("torch", "error", found, wanted, fix)
    if gpus and cuda is None:
        fix = "pip install --force-reinstall torch, from an index of CUDA builds"
        return Check("torch", "warning", found, wanted, fix)
    if cuda and not gpus:
        return Check("torch", "note", f"{found}, without a GPU to use it", wanted)
    return Check("torch", "ok", found, wanted)


def _triton(version: str | None, gpus: tuple[GpuFacts, ...]) -> Check:
    wanted = f"{_dotted(OLDEST_TRITON)} or newer, and a C compiler"
    if not gpus:
        found = version or "missing"
        return Check("triton", "ok", f"{found}; not used without a GPU")
    if version is None or _numbers(version) < OLDEST_TRITON:
        fix = to_install("compute")
        return Check("triton", "error", version or "missing", wanted, fix)
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        fix = "apt-get install gcc python3-dev"
        return Check("triton", "error", f"{version}, no C compiler", wanted, fix)
    return Check("triton", "ok", version, wanted)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(word) for word in re.findall(r"\d+", version.partition("+")[0])[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
