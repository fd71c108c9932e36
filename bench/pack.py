"""Speed of `headrace pack` on this file system, as a share of `cp`: one ratio within one run.

    python bench/pack.py [--quick] [--dir DIR] [--repeats N] [--experts FORMAT] [--device NAME]

Makes a checkpoint with experts of the released size, then copies it with `cp --reflink=never` and
re-packs it without loss, alternating, each from a cold source and each followed by `sync`; medians.
pack runs in this process: the start of an interpreter does not count, its checks and plan do. With
another FORMAT the quantising is timed instead, on weights made on the spot. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import headrace  # noqa: E402
from tests.support.fake_checkpoint import write_fake_checkpoint  # noqa: E402

REAL_EXPERTS = 15_360
HIDDEN, WIDTH = 5120, 2304  # of the released model: 18,800,640 bytes an expert


def main() -> int:
    """Measure, print a line for each figure and the object last."""
    args = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=args.dir) as home:
        directory = Path(home)
        source = make_source(directory / "source", args)
        pack(source, directory / "warm", args)  # imports, and the drive woken
        shutil.rmtree(directory / "warm")
        if args.experts == "fp4":
            found = compare_with_cp(source, directory, args)
        else:
            found = quantise(source, directory, args)
    for name, value in found.items():
        print(f"{name:24} {value}")
    print(json.dumps(found))
    return 0


def parse_arguments() -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(description="Measure headrace pack against cp.")
    parser.add_argument("--dir", default="/var/tmp", help="a directory on the drive to measure")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--per-layer", type=int, default=24, help="experts of a layer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--experts", default="fp4")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quick", action="store_true", help="half of the bytes, 3 repeats")
    args = parser.parse_args()
    if args.quick:
        args.layers, args.per_layer, args.repeats = 2, 24, 3
    return args


def make_source(directory: Path, args: argparse.Namespace) -> Path:
    """Write a checkpoint whose experts have the released shape, its pages dropped."""
    write_fake_checkpoint(
        directory,
        n_shards=args.layers + 1,
        n_layers=args.layers,
        n_experts=args.per_layer,
        hidden_size=HIDDEN,
        expert_width=WIDTH,
    )
    subprocess.run(["sync"], check=True)
    return directory


def compare_with_cp(source: Path, directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return both rates and their ratio."""
    rates: dict[str, list[float]] = {"cp": [], "pack": []}
    for _ in range(args.repeats):
        for name, run in (("cp", copy), ("pack", pack)):
            target = directory / name
            drop_pages(source)
            started = time.perf_counter()
            run(source, target, args)
            subprocess.run(["sync"], check=True)
            seconds = time.perf_counter() - started
            rates[name].append(written_bytes(target) / seconds / 1e6)
            shutil.rmtree(target)
            subprocess.run(["sync"], check=True)
    pairs = [ours / theirs for ours, theirs in zip(rates["pack"], rates["cp"], strict=True)]
    return {
        "source_mb": round(written_bytes(source) / 1e6),
        "repeats": args.repeats,
        "cp_mb_per_s": [round(rate) for rate in rates["cp"]],
        "pack_mb_per_s": [round(rate) for rate in rates["pack"]],
        "pack_vs_cp_pairs": [round(pair, 3) for pair in pairs],
        "pack_vs_cp": round(statistics.median(rates["pack"]) / statistics.median(rates["cp"]), 3),
    }


def quantise(source: Path, directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return experts per second of quantising, and hours for the whole model."""
    n_experts = args.layers * args.per_layer
    seconds = []
    for _ in range(args.repeats):
        drop_pages(source)
        done = json.loads(pack(source, directory / "pack", args).splitlines()[-1])
        seconds.append(done["seconds"])  # from the first byte to the last: imports do not count
        shutil.rmtree(directory / "pack")
    rate = n_experts / statistics.median(seconds)
    return {
        "experts": args.experts,
        "n_experts": n_experts,
        "seconds": seconds,
        "experts_per_s": round(rate, 3),
        "hours_for_the_model": round(REAL_EXPERTS / rate / 3600, 3),
    }


def copy(source: Path, target: Path, _args: argparse.Namespace) -> str:
    """Copy the directory with cp."""
    subprocess.run(["cp", "--reflink=never", "-r", source, target], check=True)
    return ""


def pack(source: Path, target: Path, args: argparse.Namespace) -> str:
    """Pack the directory; return what was printed."""
    command = ["pack", str(source), str(target), "--copy", "--json"]
    command += ["--jobs", str(args.jobs), "--experts", args.experts, "--device", args.device]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert headrace.main(command) == 0
    return out.getvalue()


def drop_pages(directory: Path) -> None:
    """Take a directory's files out of the page cache."""
    for path in directory.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def written_bytes(directory: Path) -> int:
    """Return the bytes of a directory's files."""
    return sum(path.stat().st_size for path in directory.iterdir())


if __name__ == "__main__":
    sys.exit(main())
