"""Launch every kernel of the room on a GPU at small odd sizes, for a checker to watch.

    python tests/support/kernel_tour.py [--kernel NAME ...] [--list] [--planted TOOL]

Prints a line for each launch once it has ended. NAME is "module.function", or a module for all of
its kernels. `--planted` launches a kernel with an error that the tool TOOL of compute-sanitizer
finds, and nothing else. Each tensor is an allocation of its own and of just its size, so that a
read behind it leaves the allocation. Exit status 2: there is no GPU here, or no such kernel.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # before torch is there

import torch
from triton.runtime.jit import JITFunction

from tests.support.kernel_stops import STOPS
from tests.support.planted_errors import PLANTED


def chosen(names: Sequence[str]) -> list[str]:
    """Return the kernels that are named, all where none is; ValueError for an unknown name."""
    found = []
    for name in names or list(STOPS):
        matching = [kernel for kernel in STOPS if name in {kernel, kernel.partition(".")[0]}]
        if not matching:
            raise ValueError(f"no kernel {name}: --list names them")
        found += matching
    return list(dict.fromkeys(found))


@contextmanager
def _told() -> Iterator[list[str]]:
    """Wait for each launch and print a line; yield the list that takes the kernels' names."""
    names: list[str] = []
    own = JITFunction.run

    def run(kernel: Any, *arguments: Any, grid: Any, **options: Any) -> Any:
        result = own(kernel, *arguments, grid=grid, **options)
        torch.cuda.synchronize()
        name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
        names.append(name)
        print(f"{name} grid {tuple(grid)}", flush=True)
        return result

    JITFunction.run = run
    try:
        yield names
    finally:
        JITFunction.run = own


def main(arguments: Sequence[str]) -> int:
    """Do what the module's docstring says."""
    parser = argparse.ArgumentParser(description="launch every kernel at small odd sizes")
    parser.add_argument("--kernel", action="append", default=[], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the kernels' names")
    parser.add_argument("--planted", choices=sorted(PLANTED), metavar="TOOL")
    asked = parser.parse_args(arguments)
    try:
        kernels = chosen(asked.kernel)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if asked.list:
        print("\n".join(kernels))
        return 0
    if not torch.cuda.is_available():
        print("no CUDA device here: kernels are launched on one", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    stops = {kernel: STOPS[kernel] for kernel in kernels}
    if asked.planted:
        stops = dict([PLANTED[asked.planted]])
    with _told() as launched:
        for stop in dict.fromkeys(stops.values()):
            stop()
    missing = sorted(set(stops) - set(launched))
    if missing:
        print(f"not launched here: {', '.join(missing)}", file=sys.stderr)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
