"""Launches of kernels without a GPU: recorded as Hopper would get them, and compiled for it.

Tensors on the "meta" device pose as a GPU's, so that the launchers themselves run and nothing is
allocated; a launch is kept in place of running. Only for a process of its own: what poses as a GPU
is seen by everything in it. Needs the compiler that Triton brings along, and no driver.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)
GPU = torch.device("cuda", 0)
META = torch.device("meta")
SHARED_BYTES = 227 << 10  # of one program
REGISTERS = 65536  # of one program's threads together


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch, as its launcher asked for it."""

    kernel: Any  # JITFunction
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """Module and function."""
        return f"{self.kernel.fn.__module__}.{self.kernel.fn.__name__}"


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the machine code of one launch takes."""

    name: str
    settings: str  # the constants and options that it was compiled with
    registers: int  # a thread
    most_registers: int  # what its launcher allows a thread, 0: it does not say
    stack_bytes: int  # a thread, spilled registers among them
    shared_bytes: int  # a program
    n_warps: int
    seconds: float  # that the compilation took
    error: str = ""  # why there is no machine code


class Posing(TorchFunctionMode):
    """What is said to be on a GPU is on the meta device, and says it is on a GPU."""

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func == Tensor.device.__get__:
            return GPU if args[0].is_meta else func(*args)
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return args[0].is_meta
        if func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.is_pinned:
            return True
        named = {name: _moved(value) for name, value in (kwargs or {}).items()}
        named.pop("pin_memory", None)
        return func(*map(_moved, args), **named)


def _moved(value: Any) -> Any:
    """Return meta in place of a GPU."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return META
    return META if isinstance(value, str) and value.startswith("cuda") else value


class _Pointer:
    """A tensor's argument: its type and how it is aligned."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self._at = int(tensor.storage_offset()) * tensor.element_size()

    def data_ptr(self) -> int:
        """Return an address of the tensor's alignment."""
        return self._at


class _Driver:
    """As much of a driver as a compilation asks for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Let kernels be launched, and yield the list that takes their launches."""
    launches: list[Launch] = []

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        del grid, warmup
        kept = tuple(_Pointer(a) if isinstance(a, Tensor) else a for a in arguments)
        launches.append(Launch(kernel, kept, options))

    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: _Properties()  # type: ignore[assignment]
    driver.set_active(_Driver())
    own, JITFunction.run = JITFunction.run, run
    try:
        with Posing():
            yield launches
    finally:
        JITFunction.run = own


class _Properties:
    """An H200."""

    multi_processor_count = 132
    is_integrated = False


def distinct(launches: list[Launch]) -> list[Launch]:
    """Return the launches that differ in what is compiled, in their order."""
    found: dict[str, Launch] = {}
    for launch in launches:
        _, _, _, _, binder = launch.kernel.device_caches[0]
        _, specialization, options = binder(*launch.arguments, **_options(launch))
        found.setdefault(f"{launch.name} {specialization} {options}", launch)
    return list(found.values())


def compiled(launch: Launch) -> Compiled:
    """Compile a launch for Hopper."""
    options = _options(launch)
    parts = {**launch.options}
    settings = ", ".join(f"{name}={value}" for name, value in sorted(parts.items()))
    most, warps = int(parts.get("maxnreg") or 0), int(parts.get("num_warps", 4))
    began = time.monotonic()
    try:
        kernel = launch.kernel.run(*launch.arguments, grid=(1,), warmup=True, **options)
    except Exception as error:  # noqa: BLE001  whatever the compiler raises
        text = str(error).strip() or type(error).__name__
        return Compiled(launch.name, settings, 0, most, 0, 0, warps, 0, text)
    took = time.monotonic() - began
    used, shared = _usage(kernel.asm["cubin"]), int(kernel.metadata.shared)
    warps = int(kernel.metadata.num_warps)
    return Compiled(
        launch.name, settings, used["REG"], most, used["STACK"], shared, warps, round(took, 2)
    )


def _options(launch: Launch) -> dict[str, Any]:
    return {"debug": False, **launch.options}


def tool(name: str) -> Path | None:
    """Return one of the programs that Triton brings along, None where it does not."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return path if path.is_file() else None


def _usage(cubin: bytes) -> dict[str, int]:
    """Return registers and bytes of a thread, by cuobjdump's names."""
    program = tool("cuobjdump")
    assert program is not None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(program), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED):(\d+)", text)}


def without_cache(folder: Path) -> None:
    """Compile everything anew, with `folder` for what the compiler writes."""
    triton.knobs.cache.dir = str(folder)
    triton.knobs.compilation.always_compile = True
