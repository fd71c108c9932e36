"""The command `headrace pack`: its flags, its order of work, its words."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .plan import PackOptions

EXPERTS = ("fp4", "q2k-q3k", "q4k", "q8_0")
DEFAULT_JOBS = 8
MAX_JOBS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add source, target and what goes where."""
    parser.add_argument("source", metavar="SRC", help="model directory, GGUF file, or demo")
    parser.add_argument("target", metavar="DST", help="directory of the pack, new or begun before")
    parser.add_argument(
        "--experts", choices=EXPERTS, help="format of the experts (default: as in the source)"
    )
    parser.add_argument(
        "--stripe", metavar="DIR,DIR", help="spread each expert over these directories' drives"
    )
    parser.add_argument("--mirror", metavar="DIR", help="write the experts a second time, there")
    parser.add_argument("--layers", metavar="A-B", help="pack the experts of these layers only")
    parser.add_argument(
        "--jobs", metavar="N", type=int, default=DEFAULT_JOBS,
        help=f"experts read and written at a time (default: {DEFAULT_JOBS})",
    )  # fmt: skip
    engram = parser.add_mutually_exclusive_group()
    engram.add_argument(
        "--copy", action="store_true", help="copy the Engram tables instead of linking their shards"
    )
    engram.add_argument(
        "--interleave-engram", action="store_true",
        help="copy the Engram tables with a row's values and scales together",
    )  # fmt: skip
    parser.add_argument(
        "--device", metavar="NAME", default="auto",
        help="where to quantise: cpu, cuda, cuda:N (default: a GPU where there is one)",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    parser.add_argument(
        "--json", action="store_true", help="progress and result as JSON, an object a line"
    )


def run(args: argparse.Namespace) -> int:
    """Pack, or go on with what was begun; raises HeadraceError."""
    from compute.commands.byte_report import Report
    from protocol.errors import ConfigError
    from protocol.files.checkpoint import model_kind, open_checkpoint, resolve_model
    from protocol.files.collector import collector_paused
    from protocol.files.model_config import load_model_config

    from .packing import pack, preview
    from .plan import SOURCE_FORMATS, make_plan
    from .preflight import check_places

    if not 1 <= args.jobs <= MAX_JOBS:
        raise ConfigError(f"--jobs: {args.jobs} is not a number from 1 to {MAX_JOBS}")
    source = resolve_model(args.source)
    kind = model_kind(source)
    options = _options(args, source, "fp4" if kind == "official" else SOURCE_FORMATS)
    check_places(options, load_model_config(source) if kind == "official" else None)
    with collector_paused():
        plan = make_plan(options, open_checkpoint(source))
    report = Report("packing", as_json=args.json)
    if args.dry_run:
        return preview(plan, report, jobs=args.jobs, device=args.device)
    return pack(plan, report, jobs=args.jobs, device=args.device)


def parse_layers(text: str) -> tuple[int, ...]:
    """Return the layers that "3", "0-9" or "0-3,7" means, ascending; raises ConfigError."""
    from protocol.errors import ConfigError
    from protocol.lists import split_list

    layers: set[int] = set()
    for part in split_list(text, "--layers", "layers such as 3, 0-9 or 0-3,7"):
        first, dash, last = part.partition("-")
        numbers = (first, last) if dash else (first, first)
        if not all(number.isascii() and number.isdigit() for number in numbers):
            raise ConfigError(f"--layers: {part!r} is neither a layer nor a range such as 0-9")
        a, b = map(int, numbers)
        if a > b or b >= 1 << 12:
            raise ConfigError(f"--layers: {part!r} is no range of layers")
        layers.update(range(a, b + 1))
    return tuple(sorted(layers))


def _options(args: argparse.Namespace, source: Path, experts: str) -> PackOptions:
    from protocol.lists import split_list

    from .plan import ENGRAM_COPIED, ENGRAM_LINKED, ENGRAM_ROWS, PackOptions

    engram = ENGRAM_COPIED if args.copy else ENGRAM_LINKED
    wanted = "two directories or more"
    stripes = [] if args.stripe is None else split_list(args.stripe, "--stripe", wanted)
    return PackOptions(
        source=source,
        target=_directory(args.target, "DST"),
        experts=args.experts or experts,
        stripes=tuple(_directory(path, "--stripe") for path in stripes),
        mirror=_directory(args.mirror, "--mirror") if args.mirror is not None else None,
        layers=parse_layers(args.layers) if args.layers is not None else None,
        engram=ENGRAM_ROWS if args.interleave_engram else engram,
    )


def _directory(text: str, where: str) -> Path:
    from protocol.errors import ConfigError

    if not text:
        raise ConfigError(f"{where}: '' names no directory")
    return Path(text).expanduser().absolute()
