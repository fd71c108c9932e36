"""`headrace bench`: how fast a model is here, cold and warm apart, as a report to keep.

Starts expert daemons of its own, in private directories, and computes in this process. Greedy;
ids that end a text are ignored. The report is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from compute.commands.writable import check_file
from compute.config import MODEL_OPTIONS, ComputeConfig, add_config_arguments, load_config
from protocol.errors import ConfigError, why_unread

from .compare import compare
from .report import DEFINITION, FORMAT, KINDS, BenchRun, machine_facts, read_report, summary
from .running import Settings, run_all

_LIMITS = {
    "prompt_tokens": (2, 1 << 20),
    "new_tokens": (2, 1 << 16),
    "repeats": (1, 1000),
    "warm_ups": (0, 1000),
}
_DEFAULTS = {"prompt_tokens": 128, "new_tokens": 64, "repeats": 3, "warm_ups": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how much is measured, what it is compared with, and the model's flags."""
    for name, text in (
        ("prompt_tokens", "of each prompt"),
        ("new_tokens", "generated after each"),
        ("repeats", "cold runs, and warm runs"),
        ("warm_ups", "requests before the warm runs"),
    ):
        flag = "--" + name.replace("_", "-")
        default = _DEFAULTS[name]
        parser.add_argument(
            flag, metavar="N", type=int, default=default, help=f"{text} (default: {default})"
        )
    parser.add_argument("--text", metavar="FILE", help="to cut prompts from (default: the demo's)")
    parser.add_argument("--text-seed", metavar="N", type=int, help="(default: another each time)")
    parser.add_argument("--report", metavar="FILE", help="write the report there")
    parser.add_argument("--from", dest="earlier", metavar="FILE", help="a report, not a new run")
    parser.add_argument("--compare", metavar="OTHER.json", help="show ratios to another report")
    parser.add_argument("--json", action="store_true", help="print the report as the last line")
    add_config_arguments(parser, (*MODEL_OPTIONS, "arena", "read_threads"))


def run(args: argparse.Namespace) -> int:
    """Measure or take a report, compare, tell."""
    if args.report:
        check_file(Path(args.report), "--report")
    other = None if args.compare is None else read_report(Path(args.compare))
    report = _measured(args) if args.earlier is None else read_report(Path(args.earlier))
    if args.report:
        Path(args.report).write_text(json.dumps(report) + "\n", encoding="utf-8")
    shown = dict(report)
    if other is not None:
        shown["comparison"] = compare(report, other, args.compare)
    if args.json:
        sys.stdout.write(json.dumps(shown) + "\n")
    else:
        _print(shown)
    return 0


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    from compute.load import find_device
    from protocol.files.checkpoint import open_checkpoint, resolve_model

    config = load_config(args, os.environ)
    settings = _settings(args)
    checkpoint = open_checkpoint(resolve_model(config.model))
    config = replace(config, device=str(find_device(config.device, checkpoint)))
    text = _text(args.text)
    runs: list[BenchRun] = []

    def told(one: BenchRun) -> None:
        if not args.json:
            sys.stdout.write(_run_line(one) + "\n")
            sys.stdout.flush()

    machine = machine_facts(checkpoint.shards[0].path)
    runs.extend(run_all(config, settings, text, told))
    by_kind = {kind: [one for one in runs if one.kind == kind] for kind in KINDS}
    return {
        "format": FORMAT,
        "machine": machine,
        "model": {"path": str(checkpoint.path), "fingerprint": checkpoint.fingerprint.hex()},
        "settings": _settings_facts(config, settings),
        "definition": DEFINITION,
        **{kind: summary(found) if found else None for kind, found in by_kind.items()},
    }


def _settings(args: argparse.Namespace) -> Settings:
    for name, (least, most) in _LIMITS.items():
        if not least <= getattr(args, name) <= most:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag}: {getattr(args, name)} is not from {least} to {most}")
    seed = random.SystemRandom().randrange(1 << 32) if args.text_seed is None else args.text_seed
    return Settings(args.prompt_tokens, args.new_tokens, args.repeats, args.warm_ups, seed)


def _settings_facts(config: ComputeConfig, settings: Settings) -> dict[str, Any]:
    return {
        "prompt_tokens": settings.prompt_tokens,
        "new_tokens": settings.new_tokens,
        "repeats": settings.repeats,
        "warm_ups": settings.warm_ups,
        "text_seed": settings.seed,
        "precision": config.precision,
        "device": config.device,
        "chunk": config.chunk,
        "graph": config.graph,
        "segments": config.segments,
        "side_streams": config.side_streams,
        "device_cache": config.device_cache,
        "arena_bytes": config.arena,
        "read_threads": config.read_threads,
    }


def _text(name: str | None) -> str:
    from protocol.files.checkpoint import resolve_model

    path = resolve_model("demo") / "heldout.txt" if name is None else Path(name)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text: {path}: cannot be read: {why_unread(error)}") from None


def _run_line(one: BenchRun) -> str:
    return (
        f"{one.kind:<9} first token {one.first_token_s:8.3f} s, decode "
        f"{one.decode_tokens_per_second:8.2f} tokens/s, hits {one.hit_rate:6.1%}, "
        f"stalled {one.stall_ms_per_token:7.2f} ms a token"
    )


def _print(report: dict[str, Any]) -> None:
    lines = [f"medians of {report['model']['path']}; cold and warm are never averaged"]
    for kind in KINDS:
        found = report[kind]
        if found is None:
            lines.append(f"{kind:<9} none: the arena does not hold all that was picked")
            continue
        low, high = found["decode_spread"]
        lines.append(
            f"{kind:<9} first token {found['first_token_s']:8.3f} s, decode "
            f"{found['decode_tokens_per_second']:8.2f} tokens/s ({low:.2f} to {high:.2f}), "
            f"hits {found['hit_rate']:6.1%}"
        )
    lines.append(f"hit rate: {report['definition']['hit_rate']}")
    lines += _comparison_lines(report.get("comparison"))
    sys.stdout.write("\n".join(lines) + "\n")


def _comparison_lines(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return []
    lines = [f"against {found['other']}, this over that:"]
    for kind, ratios in found["ratios"].items():
        lines.append(
            f"{kind:<9} first token {ratios['first_token_s']:.2f}, prefill "
            f"{ratios['prefill_tokens_per_second']:.2f}, decode "
            f"{ratios['decode_tokens_per_second']:.2f}, hits "
            f"{100 * ratios['hit_rate_difference']:+.1f} points"
        )
    for fact, sides in found["differences"].items():
        theirs, ours = ("not given" if side in (None, "") else side for side in sides)
        lines.append(f"  {fact} differs: {theirs} there, {ours} here")
    return lines
