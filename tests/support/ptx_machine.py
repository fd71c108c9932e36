"""A machine that runs a compiled kernel's PTX on the CPU: warps of 32 lanes that never part.

It knows what the compiler makes of our kernels, not all of PTX, and says so when it meets more.
Warps of a program take turns at barriers, and where they wait for bulk copies; a copy is done at
once. A load or store that is not aligned or outside is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from .ptx_copies import BulkCopies, product
from .ptx_operations import Lanes, cut, result, signed

LANES = 32
GLOBAL = 1 << 28  # where the device's memory begins
SHARED_BYTES = 227 << 10
BARRIER, COPY = "barrier", "copy"  # what a warp pauses for
_LANE = np.arange(LANES)


class PtxMachine:
    """Device memory, and programs that run on it one after another."""

    def __init__(self) -> None:
        self.memory = bytearray()

    def place(self, data: bytes) -> int:
        """Copy bytes to a multiple of 256; return their address."""
        at = len(self.memory)
        self.memory += data + bytes(-len(data) % 256)
        return GLOBAL + at

    def read(self, address: int, n_bytes: int) -> bytes:
        """Bytes of the device's memory."""
        return bytes(self.memory[address - GLOBAL : address - GLOBAL + n_bytes])

    def run(self, ptx: str, parameters: Sequence[int], grid: tuple[int, int], n_warps: int) -> None:
        """Run every program of a grid; the launcher's own hidden parameters are 0."""
        statements, labels = _parse(ptx)
        for y in range(grid[1]):
            for x in range(grid[0]):
                shared, copies = bytearray(SHARED_BYTES), BulkCopies()
                special = {"%ctaid.x": x, "%ctaid.y": y, "%ctaid.z": 0, "global_smem": 0}
                special |= {"%nctaid.x": grid[0], "%nctaid.y": grid[1]}
                waiting = [
                    _Warp(self.memory, shared, copies, [*parameters, 0, 0], special, warp).run(
                        statements, labels
                    )
                    for warp in range(n_warps)
                ]
                while waiting:
                    waiting = _to_the_barrier(waiting)


def _to_the_barrier(waiting: list[Iterator[str]]) -> list[Iterator[str]]:
    """Let warps run to a barrier; return those that have not ended."""
    there: list[Iterator[str]] = []
    while waiting:
        paused = [(warp, next(warp, None)) for warp in waiting]
        there += [warp for warp, why in paused if why == BARRIER]
        waiting = [warp for warp, why in paused if why == COPY]
        assert len(waiting) < len(paused) or there, "copies that nobody asked for"
    return there


def _parse(ptx: str) -> tuple[list[str], dict[str, int]]:
    """Return the statements of the only entry, and where labels stand among them."""
    text = ptx[ptx.index("{", ptx.index(".entry")) + 1 :]
    text = re.sub(r"//[^\n]*|\.loc[^\n]*|\.section.*|\.reg [^;]*;", "", text)
    statements: list[str] = []
    labels: dict[str, int] = {}
    scopes, n_scopes = [0], 0  # a label in braces is known there alone
    branches: list[tuple[int, list[int]]] = []
    for part in text.split(";"):
        statement = part.strip()
        while found := re.match(r"([$\w]+):\s*|[{}]\s*", statement):
            if found[1]:
                labels[f"{found[1]} {scopes[-1]}"] = len(statements)
            elif statement[0] == "{":
                n_scopes += 1
                scopes.append(n_scopes)
            elif len(scopes) > 1:
                scopes.pop()
            statement = statement[found.end() :]
        if re.search(r"\bbra\b", statement):
            branches.append((len(statements), [*scopes]))
        if statement:
            statements.append(" ".join(statement.split()))
    for at, around in branches:
        target = statements[at].rsplit(" ", 1)[1]
        scope = next(s for s in reversed(around) if f"{target} {s}" in labels)
        statements[at] += f" {scope}"
    return statements, labels


class _Warp:
    """The registers of 32 lanes."""

    def __init__(
        self,
        memory: bytearray,
        shared: bytearray,
        copies: BulkCopies,
        parameters: list[int],
        special: dict[str, int],
        warp: int,
    ) -> None:
        self._copies, self._spaces = copies, {"global": (memory, GLOBAL), "shared": (shared, 0)}
        self._parameters = parameters
        self._registers = {name: _all(value) for name, value in special.items()}
        self._registers["%tid.x"] = (_LANE + LANES * warp).astype(np.uint64)
        self._active = np.ones(LANES, dtype=bool)

    def run(self, statements: list[str], labels: dict[str, int]) -> Iterator[str]:
        """Run to the end, with pauses that say what for."""
        at = 0
        while True:
            statement = self._guarded(statements[at])
            operation, _, rest = statement.partition(" ")
            at += 1
            if operation in {"ret", "exit", "bra", "bra.uni"}:
                if not self._active.any():
                    continue
                assert self._active.all(), f"lanes part at {statement}"
                if operation in {"ret", "exit"}:
                    return
                at = labels[rest]
            elif operation == "bar.sync":
                yield BARRIER
            elif operation.startswith("mbarrier.try_wait"):
                flag, barrier, _ = _operands(rest)
                while not self._copies.there(self._address(barrier)):
                    yield COPY
                self._write(flag, _all(1))
            elif operation != "bar.warp.sync":
                self._do(operation, _operands(rest))

    def _guarded(self, statement: str) -> str:
        self._active = np.ones(LANES, dtype=bool)
        if found := re.match(r"@(!?)(\S+) (.*)", statement):
            self._active = self._value(found[2]).astype(bool) ^ (found[1] == "!")
            return found[3]
        return statement

    def _do(self, operation: str, operands: list[str]) -> None:
        head = operation.split(".", 1)[0]
        special: dict[str, Callable[[str, list[str]], None]] = {
            "ld": self._load,
            "st": self._store,
            "stmatrix": partial(self._matrix, store=True),
            "ldmatrix": partial(self._matrix, store=False),
            "shfl": self._shuffle,
            "redux": self._reduce,
            "mma": self._product,
            "cp": self._bulk_copy,
            "mbarrier": self._expect,
            **dict.fromkeys(("fence", "griddepcontrol"), lambda *_: None),
        }
        if head in special:
            special[head](operation, operands)
        elif head == "mov" and "{" in "".join(operands):
            self._pack(operation, operands)
        else:
            self._write(operands[0], result(operation, [self._value(o) for o in operands[1:]]))

    def _value(self, name: str) -> Lanes:
        if name.startswith("0f"):
            return _all(int(f"0x{name[2:]}", 0))
        if re.fullmatch(r"(-?\d+|0x[0-9a-fA-F]+)U?", name):
            return _all(int(name.removesuffix("U"), 0))
        return self._registers[name]

    def _write(self, name: str, value: Lanes) -> None:
        if not self._active.all() and name in self._registers:
            value = np.where(self._active, value, self._registers[name])
        self._registers[name] = value

    def _places(self, operation: str, operand: str, size: int) -> tuple[bytearray, list[int]]:
        """The memory that an operation names, and each lane's place in it."""
        space, base = self._spaces["shared" if ".shared" in operation else "global"]
        name, _, more = operand.strip("[] ").partition("+")
        addresses = self._value(name.strip()) + (self._value(more.strip()) if more else _all(0))
        places = [int(address) - base for address in addresses]
        for lane in _LANE[self._active]:
            assert places[lane] % size == 0, f"{operation} is not aligned"
            assert 0 <= places[lane] <= len(space) - size, f"{operation} is outside"
        return space, places

    def _load(self, operation: str, operands: list[str]) -> None:
        if ".param" in operation:
            parameter = re.search(r"param_(\d+)", operands[1])
            assert parameter
            self._write(operands[0], _all(self._parameters[int(parameter[1])]))
            return
        names, size = _names(operands[0]), int(operation.rsplit(".", 1)[1][1:]) // 8
        space, places = self._places(operation, operands[1], size * len(names))
        for number, name in enumerate(names):
            value = np.zeros(LANES, dtype=np.uint64)
            for lane in _LANE[self._active]:
                at = places[lane] + number * size
                value[lane] = int.from_bytes(space[at : at + size], "little")
            self._write(name, value)

    def _store(self, operation: str, operands: list[str]) -> None:
        names, size = _names(operands[1]), int(operation.rsplit(".", 1)[1][1:]) // 8
        space, places = self._places(operation, operands[0], size * len(names))
        for number, name in enumerate(names):
            value = cut(self._value(name), 8 * size)
            for lane in _LANE[self._active]:
                at = places[lane] + number * size
                space[at : at + size] = int(value[lane]).to_bytes(size, "little")

    def _matrix(self, operation: str, operands: list[str], *, store: bool) -> None:
        """Matrices of 8 rows of 16 bytes; row r of matrix m is where lane 8 m + r points."""
        assert "trans" not in operation
        names = _names(operands[1 if store else 0])
        space, places = self._places(operation, operands[0 if store else 1], 16)
        for number, name in enumerate(names):
            value = self._value(name).copy() if store else np.zeros(LANES, dtype=np.uint64)
            for lane in range(LANES):
                at = places[8 * number + lane // 4] + 4 * (lane % 4)
                if store:
                    space[at : at + 4] = int(cut(value, 32)[lane]).to_bytes(4, "little")
                value[lane] = int.from_bytes(space[at : at + 4], "little")
            if not store:
                self._write(name, value)

    def _shuffle(self, operation: str, operands: list[str]) -> None:
        other = self._value(operands[2]).astype(np.int64)
        lanes = _LANE ^ other if ".bfly" in operation else other & 31
        assert ".bfly" in operation or ".idx" in operation, operation
        self._write(operands[0].split("|")[0], self._value(operands[1])[lanes])

    def _reduce(self, operation: str, operands: list[str]) -> None:
        values = signed(self._value(operands[1]), 32)
        reduced = {"add.s32": values.sum(), "max.s32": values.max()}
        self._write(operands[0], cut(_all(int(reduced[operation.removeprefix("redux.sync.")])), 32))

    def _product(self, operation: str, operands: list[str]) -> None:
        a, b, c = ([self._value(name) for name in _names(o)] for o in operands[1:])
        for name, value in zip(_names(operands[0]), product(operation, a, b, c), strict=True):
            self._write(name, value)

    def _address(self, operand: str) -> int:
        """The address in shared memory that all active lanes name."""
        _, places = self._places(".shared", operand, 8)
        return places[int(_LANE[self._active][0])]

    def _expect(self, operation: str, operands: list[str]) -> None:
        if self._active.any() and ".init" not in operation:
            assert ".expect_tx" in operation, operation
            self._copies.expect(self._address(operands[1]), int(operands[2]))

    def _bulk_copy(self, operation: str, operands: list[str]) -> None:
        assert ".shared" in operation and self._active.sum() <= 1, "several lanes ask for the same"
        n_bytes = int(operands[2])
        assert n_bytes % 16 == 0, "bulk copies are of 16 bytes and more"
        for lane in _LANE[self._active]:
            shared, to = self._places(".shared", operands[0], 16)
            memory, source = self._places(".global", operands[1], 16)
            assert source[lane] + n_bytes <= len(memory), f"{operation} is outside"
            assert to[lane] + n_bytes <= len(shared), f"{operation} is outside"
            data = memory[source[lane] : source[lane] + n_bytes]
            shared[to[lane] : to[lane] + n_bytes] = data
            self._copies.came(self._address(operands[3]), n_bytes)

    def _pack(self, operation: str, operands: list[str]) -> None:
        """Move between one register and the parts of a wider one."""
        to, source = _names(operands[0]), _names(operands[1])
        width = int(operation.rsplit(".", 1)[1][1:]) // max(len(to), len(source))
        if len(to) > 1:
            whole = self._value(source[0])
            for number, name in enumerate(to):
                self._write(name, cut(whole >> np.uint64(width * number), width))
            return
        total = _all(0)
        for number, name in enumerate(source):
            total |= cut(self._value(name), width) << np.uint64(width * number)
        self._write(to[0], total)


def _all(value: int) -> Lanes:
    return np.full(LANES, value & 0xFFFFFFFFFFFFFFFF, dtype=np.uint64)


def _names(operand: str) -> list[str]:
    return [name.strip() for name in operand.strip("{} ").split(",")]


def _operands(rest: str) -> list[str]:
    """Split at commas outside brackets and braces."""
    return [part.strip() for part in re.split(r",(?![^{\[]*[}\]])", rest)]
