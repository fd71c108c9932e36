"""Digests of functions over blocks of 2^24 inputs, and those of the C library, committed.

    python tests/support/libm_digests.py    writes the committed file anew, in about a minute

Wants gcc, glibc 2.36 and an x86-64 machine with FMA: expf has other bits elsewhere.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FILE = Path(__file__).resolve().parents[1] / "data" / "libm" / "glibc-2.36-x86_64-fma.txt"
FUNCTIONS = ("expf", "log1pf", "softplus_sqrt")
BLOCK = 1 << 24
_NAN = 0x7FC00000
_CHUNK = 1 << 17  # inputs at a time, for the processor's cache


def committed() -> dict[str, list[int]]:
    """Return each function's digest of each of the 256 blocks."""
    rows = [line.split() for line in FILE.read_text().splitlines() if not line.startswith("#")]
    assert [int(row[0], 16) for row in rows] == list(range(256))
    return {name: [int(row[1 + n], 16) for row in rows] for n, name in enumerate(FUNCTIONS)}


def digest(inputs: Tensor, results: Tensor) -> int:
    """Return the sum, modulo 2^64, of a mix of inputs (bits, i64) and results (f32)."""
    bits = results.view(torch.int32).long() & 0xFFFFFFFF
    bits = bits.masked_fill_(results.isnan(), _NAN)
    mixed = (inputs << 32 | bits).numpy().view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    return int(mixed.sum(dtype=np.uint64))


def block_digest(function: Callable[[Tensor], Tensor], block: int) -> int:
    """Return a torch function's digest of one block."""
    total = 0
    for first in range(block * BLOCK, (block + 1) * BLOCK, _CHUNK):
        inputs = torch.arange(first, first + _CHUNK)
        total += digest(inputs, function(inputs.to(torch.int32).view(torch.float32)))
    return total % 2**64


def main() -> int:
    """Build the C program, run it and write its lines."""
    if platform.libc_ver() != ("glibc", "2.36") or platform.machine() != "x86_64":
        print(f"wants glibc 2.36 on x86-64; here is {platform.libc_ver()}", file=sys.stderr)
        return 1
    source = Path(__file__).with_suffix(".c")
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory) / "digests"
        build = ["gcc", "-O2", "-ffp-contract=off", "-o", str(program), str(source), "-lm"]
        subprocess.run(build, check=True)
        lines = subprocess.run([program], check=True, stdout=subprocess.PIPE, text=True).stdout
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(f"# block {' '.join(FUNCTIONS)}, by tests/support/libm_digests.py\n{lines}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
