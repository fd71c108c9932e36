"""Every kernel compiles for Hopper, without a GPU, within what a program there may take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import triton

from tests.support.jit_kernels import jit_kernels
from tests.support.offline_gpu import REGISTERS, SHARED_BYTES, Compiled, Launch, compiled, tool

ROOT = Path(__file__).resolve().parents[2]
# Bytes of a thread's stack where registers are spilled, by Triton 3.9's assembler; 0 elsewhere.
MEASURED_WITH = "3.9"
STACK_BYTES = {
    "kernels.attend_sparse._attend_kernel": 288,
    "kernels.gemv_blocks_layouts._gemv_blocks_kernel": 56,
    "kernels.routed_m1_block_layouts._gate_up_kernel": 32,
    "kernels.routed_m1_bulk._bulk_down_kernel": 16,
    "kernels.routed_rows_blocks._block_rows_down_kernel": 8,
    "kernels.routed_rows_blocks._block_rows_gate_up_kernel": 56,
    "kernels.routed_rows_layouts._rows_down_kernel": 64,
    "kernels.routed_rows_layouts._rows_gate_up_kernel": 8,
    "kernels.select_blocks._select_blocks_kernel": 576,
    "kernels.top_keys.narrow_kernel": 8,
}


def problems(one: Compiled, stack_bytes: int | None) -> list[str]:
    """Return what is wrong with a launch's machine code; stack_bytes None: any stack is right."""
    if one.error:
        return [f"does not compile: {one.error}"]
    found = []
    most = one.most_registers or REGISTERS // (32 * one.n_warps)
    if one.registers > most:
        found.append(f"{one.registers} registers a thread, {most} at most")
    if one.shared_bytes > SHARED_BYTES:
        found.append(f"{one.shared_bytes} bytes of shared memory, {SHARED_BYTES} at most")
    if stack_bytes is not None and one.stack_bytes > stack_bytes:
        found.append(f"{one.stack_bytes} bytes of stack, {stack_bytes} stated")
    return found


def machine_code(*, every: bool) -> tuple[set[str], list[Compiled]]:
    """What is launched, and its machine code, from processes of their own."""
    parts = 2 if every else 1
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    program = [sys.executable, str(ROOT / "tests" / "support" / "kernel_launches.py")]

    def begun(part: int) -> subprocess.Popen[str]:
        command = [*program, str(part), str(parts), *([] if every else ["--first"])]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)

    kernels: set[str] = set()
    found: list[Compiled] = []
    n_launches = 0
    for process in [begun(part) for part in range(parts)]:
        out, errors = process.communicate()
        assert process.returncode == 0, errors
        first, *lines = map(json.loads, out.splitlines())
        kernels |= set(first["kernels"])
        n_launches = first["n_launches"]
        found += [Compiled(**line) for line in lines]
    assert len(found) == n_launches
    return kernels, found


@pytest.mark.slow
@pytest.mark.timeout(300)  # all: some 30 s of two cores that nobody else uses
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.accept)])
def test_every_kernel_of_the_room_compiles_and_fits(every: bool) -> None:
    """Of its launches all, or the first one."""
    for name in ("ptxas", "cuobjdump"):
        if tool(name) is None:
            pytest.skip(f"this Triton brings no {name} along")
    launched, found = machine_code(every=every)
    assert launched == {f"kernels.{name}" for name in jit_kernels()}
    same = triton.__version__.startswith(MEASURED_WITH + ".")
    wrong = [
        f"{one.name}: {problem}; {one.settings}"
        for one in found
        for problem in problems(one, STACK_BYTES.get(one.name, 0) if same else None)
    ]
    assert not wrong, "\n".join(wrong)
    if not every:
        return
    most = dict.fromkeys(STACK_BYTES, 0)
    for one in found:
        if one.name in most:
            most[one.name] = max(most[one.name], one.stack_bytes)
    assert most == STACK_BYTES or not same, "less stack is needed than is stated"


GOOD = Compiled("a", "", 128, 128, 0, SHARED_BYTES, 8, 1.0)


def spoiled(**changed: object) -> list[str]:
    """What is said of good code with something changed; 8 bytes of stack are stated."""
    own = {field.name: getattr(GOOD, field.name) for field in fields(GOOD)}
    return problems(Compiled(**{**own, **changed}), 8)


def test_what_is_too_much_is_found() -> None:
    assert spoiled() == spoiled(stack_bytes=8) == spoiled(registers=255, most_registers=0) == []
    assert spoiled(registers=129) == ["129 registers a thread, 128 at most"]
    assert spoiled(n_warps=16, registers=129, most_registers=0) == [
        "129 registers a thread, 128 at most"
    ]
    assert spoiled(shared_bytes=232449) == ["232449 bytes of shared memory, 232448 at most"]
    assert spoiled(stack_bytes=16) == ["16 bytes of stack, 8 stated"]


def test_a_kernel_that_does_not_compile_is_a_problem() -> None:
    def fails(*_: object, **__: object) -> None:
        raise TypeError("no such layout")

    def of_kernels() -> None: ...

    kernel = SimpleNamespace(fn=of_kernels, run=fails)
    one = compiled(Launch(kernel, (), {"num_warps": 2, "maxnreg": 64}))
    assert (one.n_warps, one.most_registers) == (2, 64)
    assert problems(one, 0) == ["does not compile: no such layout"]
