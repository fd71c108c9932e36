"""`headrace simulate`: what caches of other sizes would make of a recorded routing trace.

Replays a trace (the daemon's `--trace FILE`), or a made-up one, and compares policies with Belady's
optimum. `--synthetic KIND --write FILE` only makes a trace; `--predictions FILE` reports how well
layers were foretold. Needs no GPU and no running daemon.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.errors import ConfigError
from protocol.lists import split_list
from protocol.sizes import format_size, parse_size

from .terminal import Display

if TYPE_CHECKING:
    from rich.table import Table

    from expert_daemon.routing_trace import RoutingTrace, TraceShape
    from expert_daemon.simulate import Figures, Setting

DEFAULT_ARENAS = "10%,20%,30%,40%,50%,60%"
DEFAULT_TOKENS = 2000
MOST_TOKENS = 1_000_000
KINDS = ("flat", "skewed", "topics", "drift", "recent")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add where the trace comes from, the caches and the form of the output."""
    parser.add_argument(
        "trace", metavar="TRACE", nargs="?", help="trace file, older parts included"
    )
    parser.add_argument(
        "--predictions",
        metavar="FILE",
        help="report recall at distance 1 to 3 of what --predict-trace recorded, and nothing else",
    )
    made = parser.add_argument_group("a made-up trace instead")
    made.add_argument("--synthetic", choices=KINDS, help="how the picks are distributed")
    made.add_argument("--tokens", type=int, metavar="N", help=f"tokens (default: {DEFAULT_TOKENS})")
    made.add_argument("--seed", type=int, metavar="N", default=0, help="of the dice (default: 0)")
    made.add_argument(
        "--model", metavar="DIR", help="take this checkpoint's shape (default: the released one)"
    )
    made.add_argument("--write", metavar="FILE", help="write the trace and do nothing else")
    caches = parser.add_argument_group("caches")
    caches.add_argument(
        "--arena",
        metavar="SIZES",
        default=DEFAULT_ARENAS,
        help="such as 32GiB,64GiB or, of all experts, 30%% (default: 10%% to 60%%)",
    )
    caches.add_argument("--device", metavar="SIZE", default="", help="a device cache before it")
    caches.add_argument(
        "--tier-rule",
        choices=("auto", "on", "off"),
        default="auto",
        help="whether the arena first gives up what the device keeps (default: auto)",
    )
    caches.add_argument(
        "--policy", metavar="NAMES", default="all", help="such as lfu-da,lru (default: all)"
    )
    reads = parser.add_argument_group("reads")
    reads.add_argument("--bandwidth", metavar="RATE", default="7GB/s", help="default: 7GB/s")
    reads.add_argument(
        "--latency-ms",
        type=float,
        metavar="MS",
        default=0.2,
        help="of one request of the engine, its bytes apart (default: 0.2)",
    )
    parser.add_argument(
        "--warm-up", type=int, metavar="N", help="tokens not counted (default: a quarter of all)"
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="draw the hit rates into a .png, .svg or .pdf"
    )
    parser.add_argument("--json", action="store_true", help="print one object as the last line")


def run(args: argparse.Namespace) -> int:
    """Take the trace, replay it, print what came out."""
    if args.predictions:
        return _report_recall(args)
    if args.plot:
        from .simulate_plot import check_plot

        check_plot(Path(args.plot))
    trace, name = _trace(args)
    if args.write:
        return _write(Path(args.write), trace)
    settings, policies = _settings(args, trace.shape), _policies(args.policy)
    figures = _simulate(args, trace, settings, policies)
    if args.plot:
        from .simulate_plot import write_plot

        write_plot(Path(args.plot), figures, f"{name}: {trace.n_tokens:,} tokens")
    if args.json:
        sys.stdout.write(json.dumps(_facts(trace, name, figures)) + "\n")
    else:
        _print(args, trace, name, figures)
    return 0


def _report_recall(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.markup import escape

    from protocol.files.block_file import losses

    from .simulate_recall import read_guesses, recall_facts, recall_table

    if args.trace or args.synthetic:
        raise ConfigError("--predictions stands alone, without a TRACE and --synthetic")
    path = Path(args.predictions)
    shape, found = read_guesses(path)
    for note in losses(path, found):
        Display().line(f"headrace: {note}")
    facts = recall_facts(path, shape, found.records)
    if args.json:
        sys.stdout.write(json.dumps(facts) + "\n")
        return 0
    console = Console(highlight=False)
    console.print(f"[bold]{escape(str(path))}[/bold]")
    console.print(
        f"{facts['n_tokens']:,} tokens through {shape.n_layers} layers of {shape.n_experts} "
        f"experts, {shape.top_k} picked. Of what a layer picked, the share that its router picks "
        f"of the input so many layers before; by chance {facts['chance']:.1%}."
    )
    console.print()
    console.print(recall_table(shape, found.records))
    return 0


def _trace(args: argparse.Namespace) -> tuple[RoutingTrace, str]:
    """The trace and what it is called."""
    from expert_daemon.synthetic_trace import FLASH, synthetic_trace
    from expert_daemon.trace_file import read_trace

    if (args.trace is None) == (args.synthetic is None):
        raise ConfigError("one of the two is wanted: a TRACE, or --synthetic KIND")
    if args.trace is None:
        n_tokens = _count(args.tokens, "--tokens", DEFAULT_TOKENS, 1)
        seed = _count(args.seed, "--seed", 0, 0)
        shape = _shape(args.model) if args.model else FLASH
        trace = synthetic_trace(args.synthetic, n_tokens, shape=shape, seed=seed)
        return trace, f"synthetic, {args.synthetic}"
    for flag in ("tokens", "model", "write"):
        if getattr(args, flag) is not None:
            raise ConfigError(f"--{flag} belongs to --synthetic")
    trace, notes = read_trace(Path(args.trace))
    for note in notes:
        Display().line(f"headrace: {note}")
    return trace, args.trace


def _shape(model: str) -> TraceShape:
    from expert_daemon.routing_trace import shape_of
    from protocol.files.checkpoint import open_checkpoint, resolve_model

    shape = shape_of(open_checkpoint(resolve_model(model)))
    return replace(shape, fingerprint=bytes(len(shape.fingerprint)))  # these picks are not its own


def _write(path: Path, trace: RoutingTrace) -> int:
    from expert_daemon.trace_file import write_trace

    n_bytes = write_trace(path, trace)
    Display().line(f"{path}: {len(trace):,} tokens, {format_size(n_bytes)}")
    return 0


def _settings(args: argparse.Namespace, shape: TraceShape) -> list[Setting]:
    from expert_daemon.simulate import plan_setting

    return [
        plan_setting(shape, arena, device=args.device, tier_rule=args.tier_rule)
        for arena in split_list(args.arena, "--arena", 'sizes such as "32GiB" or 30%')
    ]


def _policies(text: str) -> list[str]:
    from expert_daemon.policy import POLICIES

    names = list(POLICIES) if text == "all" else split_list(text, "--policy", "names of policies")
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"--policy: {name!r} is none of all, {', '.join(POLICIES)}")
    return names


def _simulate(
    args: argparse.Namespace,
    trace: RoutingTrace,
    settings: list[Setting],
    policies: list[str],
) -> list[Figures]:
    from expert_daemon.simulate import Disk, simulate

    bytes_per_s = parse_size(args.bandwidth.removesuffix("/s"), "--bandwidth")
    if not bytes_per_s:
        raise ConfigError("--bandwidth: wanted more than 0 bytes a second")
    if not 0 <= args.latency_ms < 1e6:
        raise ConfigError(f"--latency-ms: {args.latency_ms} is not a time")
    warm_up = None if args.warm_up is None else _count(args.warm_up, "--warm-up", 0, 0)
    figures: list[Figures] = []
    display = Display(quiet=args.json)
    display.start_bar("replays", len(settings) * (len(policies) + 1))
    try:
        disk = Disk(bytes_per_s, args.latency_ms)
        for one in simulate(trace, settings, policies, disk, warm_up=warm_up):
            figures.append(one)
            display.advance_bar(len(figures), one.policy)
    finally:
        display.end_bar()
    return figures


def _count(number: int | None, flag: str, default: int, least: int) -> int:
    value = default if number is None else number
    if not least <= value <= MOST_TOKENS:
        raise ConfigError(f"{flag}: {value} is not a number from {least} to {MOST_TOKENS}")
    return value


def _facts(trace: RoutingTrace, name: str, figures: list[Figures]) -> dict[str, Any]:
    from expert_daemon.routing_trace import shared_with_previous

    shape = trace.shape
    return {
        "trace": name,
        "n_layers": shape.n_layers,
        "n_experts": shape.n_experts,
        "top_k": shape.top_k,
        "expert_bytes": shape.expert_bytes,
        "n_tokens": trace.n_tokens,
        "n_chunks": len(trace) - trace.n_tokens,
        "shared_with_previous": shared_with_previous(trace),
        "results": [one.as_json() for one in figures],
    }


def _print(
    args: argparse.Namespace, trace: RoutingTrace, name: str, figures: list[Figures]
) -> None:
    from rich.console import Console
    from rich.markup import escape

    facts = _facts(trace, name, [])
    console = Console(highlight=False)
    console.print(f"[bold]{escape(name)}[/bold]")
    console.print(
        f"{facts['n_tokens']:,} tokens and {facts['n_chunks']:,} chunks through "
        f"{facts['n_layers']} layers of {facts['n_experts']} experts, {facts['top_k']} picked; "
        f"{facts['shared_with_previous']:.0%} of a token's picks are the previous token's too."
    )
    console.print(
        f"The last {figures[0].n_tokens:,} tokens count, after the others have filled the caches. "
        f"Reads at {escape(args.bandwidth)} and {args.latency_ms:g} ms a layer that waits."
        f"{_device_text(figures[0].setting)} Figures are means of a token."
    )
    console.print()
    console.print(_table(figures))


def _device_text(setting: Setting) -> str:
    if not setting.n_device:
        return ""
    return (
        f" A device cache of {setting.n_device:,} experts stands before the arena; "
        f"tier rule: {setting.tier_rule}."
    )


def _table(figures: list[Figures]) -> Table:
    from rich import box
    from rich.table import Table

    has_device = any(one.setting.n_device for one in figures)
    padding = 0 if has_device else (0, 1, 0, 0)  # 80 columns are enough
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=padding, show_edge=False)
    for title in ("arena", "slots", "policy", "on\ndevice", "no\nread", "misses", "of\nbest"):
        if title != "on\ndevice" or has_device:
            left = title == "policy"
            table.add_column(title, justify="left" if left else "right", no_wrap=True)
    for title in ("read", "stall\nms", "at most\ntokens/s"):
        table.add_column(title, justify="right", no_wrap=True)
    best = {one.setting: one.misses for one in figures}  # the optimum comes last of each
    for one in figures:
        setting = one.setting
        is_first = one.policy == figures[0].policy
        device = [f"{one.device_hit_rate:.1%}" if one.device_hit_rate else "-"]
        table.add_row(
            format_size(setting.arena_bytes) if is_first else "",
            f"{setting.n_slots:,}" if is_first else "",
            one.policy,
            *(device if has_device else []),
            f"{one.hit_rate:.2%}",
            f"{one.misses:.1f}",
            f"{one.misses / best[setting]:.2f}" if best[setting] else "-",
            format_size(round(one.read_bytes)),
            f"{one.stall_ms:.1f}",
            f"{one.tokens_per_s:.1f}" if one.stall_ms else "-",
            end_section=one.policy == figures[-1].policy,
        )
    return table
