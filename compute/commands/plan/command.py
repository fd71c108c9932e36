"""`headrace plan`: what of a model fits where on a machine, and how fast it would be.

Everything it prints is a prediction by the model of docs/performance-model.md. Reads headers, the
drive for a second, and a routing trace where one is given; starts nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.errors import ConfigError
from protocol.sizes import format_size, parse_size

from .predict import Question, check_trace, first_tokens, rates, what_ifs, with_latency
from .rates import Measured

if TYPE_CHECKING:
    from protocol.files.checkpoint import Checkpoint

    from .fit import Fit
    from .machine import Machine

SMALL_CHUNK, LARGE_CHUNK = 512, 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, what hit rates come from, and what the machine has."""
    parser.add_argument("--model", metavar="DIR", required=True, help="model directory, or demo")
    parser.add_argument(
        "--trace", metavar="FILE", help="routing trace for the hit rates (default: a curve)"
    )
    parser.add_argument(
        "--bench", metavar="FILE", help="report of `headrace bench` for compute's own time"
    )
    parser.add_argument("--arena", metavar="SIZE", help="(default: what is left)")
    parser.add_argument("--chunk", metavar="N", type=int, help="prompt tokens computed at once")
    machine = parser.add_argument_group("another machine than this one")
    machine.add_argument("--memory", metavar="SIZE", help="of the host, that headrace may use")
    machine.add_argument("--gpu-memory", metavar="SIZE", help="a GPU's own; 0: unified")
    machine.add_argument("--device-rate", metavar="RATE", help="of the memory the model runs on")
    machine.add_argument("--link-rate", metavar="RATE", help="of copies to a GPU")
    machine.add_argument("--drive-rate", metavar="RATE", help='such as "7GB/s"')
    machine.add_argument("--latency-ms", metavar="MS", type=float, help="of one read")
    machine.add_argument("--read-threads", metavar="N", type=int, default=8, help="(default: 8)")
    parser.add_argument("--json", action="store_true", help="print one object as the last line")


def run(args: argparse.Namespace) -> int:
    """Plan and tell."""
    facts = plan_facts(args)
    if args.json:
        sys.stdout.write(json.dumps(facts) + "\n")
    else:
        _print(facts)
    return 0


def plan_facts(args: argparse.Namespace) -> dict[str, Any]:
    """Return everything that is printed. Raises ConfigError."""
    from protocol.files.checkpoint import open_checkpoint, resolve_model

    from .fit import fit, work_of

    if not 1 <= args.read_threads <= 64:
        raise ConfigError(f"--read-threads is {args.read_threads}, wanted 1 to 64")
    checkpoint = open_checkpoint(resolve_model(args.model))
    machine = _machine(args, checkpoint)
    trace, origin = _trace(args, checkpoint)
    arena = None if args.arena is None else parse_size(args.arena, "--arena")
    chunk = args.chunk or (SMALL_CHUNK if machine.device.kind == "cpu" else LARGE_CHUNK)
    if not 1 <= chunk <= 1 << 16:
        raise ConfigError(f"--chunk is {chunk}, wanted 1 to 65536")
    measured = Measured() if args.bench is None else _measured(Path(args.bench), checkpoint)
    question = Question(checkpoint, work_of(checkpoint), trace, measured, chunk, arena)
    laid = fit(checkpoint, machine, arena)
    cold, warm = rates(question, machine, laid)
    return {
        "model": str(checkpoint.path),
        "predicted": True,
        "hits_from": origin,
        "notes": [*machine.notes, *_compute_notes(question, machine)],
        "device": machine.device.kind,
        "drive": {
            "bytes_per_s": machine.drive.bytes_per_s,
            "latency_ms": 1000 * machine.drive.latency_s,
            "read_threads": machine.drive.n_threads,
        },
        "fit": _fit_facts(laid, question.work.n_layers * question.work.n_experts),
        "cold": cold.as_json(),
        "warm": warm.as_json(),
        "chunk": chunk,
        "first_token": first_tokens(question, machine, laid),
        "what_if": [
            {"change": name, "gain": rate.time.tokens_per_s / warm.time.tokens_per_s}
            | rate.as_json()
            for name, rate in what_ifs(question, machine)
        ],
    }


def _machine(args: argparse.Namespace, checkpoint: Checkpoint) -> Machine:
    from compute.commands.doctor.command import printed
    from compute.commands.gpu_facts import gpu_facts
    from compute.commands.machine_memory import machine_memory

    from .machine import Machine, device_of, host_bytes_per_s, measured_drive
    from .rates import Drive

    gpus = gpu_facts(printed)
    device, note = device_of(gpus, host_bytes_per_s)
    notes = [note]
    device_bytes = gpus[0].memory_bytes if gpus else 0
    if args.gpu_memory is not None:
        device_bytes = parse_size(args.gpu_memory, "--gpu-memory")
        kind = "discrete" if device_bytes else "unified"
        device = replace(device, kind=kind, link_bytes_per_s=device.link_bytes_per_s or 25e9)
        notes = ["GPU: as asked for"]
    device = replace(
        device,
        memory_bytes_per_s=_rate(args.device_rate, "--device-rate") or device.memory_bytes_per_s,
        link_bytes_per_s=_rate(args.link_rate, "--link-rate") or device.link_bytes_per_s,
    )
    drive_rate = _rate(args.drive_rate, "--drive-rate")
    if args.latency_ms is not None and not 0 <= args.latency_ms < 1e5:
        raise ConfigError(f"--latency-ms: {args.latency_ms} is not a time")
    if drive_rate and args.latency_ms is not None:
        drive, drive_note = Drive(drive_rate, 0.0, args.read_threads), "drive: as asked for"
    else:
        drive, drive_note = measured_drive(checkpoint.shards, args.read_threads)
    host = machine_memory().available_bytes
    if args.memory is not None:
        host = parse_size(args.memory, "--memory")
    return Machine(
        host_bytes=host,
        device_bytes=device_bytes,
        device=device,
        drive=with_latency(drive, args.latency_ms, drive_rate),
        notes=(*notes, drive_note),
    )


def _rate(text: str | None, flag: str) -> float | None:
    if text is None:
        return None
    rate = float(parse_size(text.removesuffix("/s"), flag))
    if not rate:
        raise ConfigError(f"{flag}: wanted more than 0 bytes a second")
    return rate


def _trace(args: argparse.Namespace, checkpoint: Checkpoint) -> tuple[Any, str]:
    if args.trace is None:
        return None, "a curve of made-up traces; record your own: headrace daemon --trace FILE"
    from expert_daemon.trace_file import read_trace

    trace, _ = read_trace(Path(args.trace))
    check_trace(trace, checkpoint)
    return trace, f"{args.trace}: {trace.n_tokens:,} tokens"


def _measured(path: Path, checkpoint: Checkpoint) -> Measured:
    from compute.commands.bench.report import read_report

    report = read_report(path)
    if report["model"]["fingerprint"] != checkpoint.fingerprint.hex():
        raise ConfigError(f"{path}: measured on another model ({report['model']['path']})")
    resident = report["resident"]
    if resident is None:
        raise ConfigError(
            f"{path}: no run with every expert in memory; give `headrace bench` a larger --arena"
        )
    return Measured(
        token_s=1 / resident["decode_tokens_per_second"],
        prompt_token_s=1 / resident["prefill_tokens_per_second"],
    )


def _compute_notes(question: Question, machine: Machine) -> list[str]:
    if question.measured.token_s:
        return ["compute: as measured by `headrace bench`"]
    notes = ["compute: from bytes and rates; `headrace bench` measures it (--bench FILE)"]
    if machine.device.kind != "cpu":
        notes.append("GPU: what its kernels measured one by one give; a step is slower as yet")
    return notes


def _fit_facts(laid: Fit, n_keys: int) -> dict[str, Any]:
    return {
        "arena_bytes": laid.arena_bytes,
        "arena_experts": laid.setting.n_resident,
        "device_cache_bytes": laid.device_cache_bytes,
        "device_cache_experts": laid.setting.n_device,
        "resident_share": min(1.0, laid.resident / n_keys),
        "engram_page_cache_bytes": laid.engram_cache_bytes,
        "dense_on_host_bytes": laid.dense_on_host_bytes,
        "dense_on_device_bytes": laid.dense_on_device_bytes,
    }


def _print(facts: dict[str, Any]) -> None:
    laid = facts["fit"]
    places = [
        ("dense weights, on the device", laid["dense_on_device_bytes"], ""),
        ("dense weights, in memory", laid["dense_on_host_bytes"], ""),
        (
            "experts on the device",
            laid["device_cache_bytes"],
            f"{laid['device_cache_experts']:,} experts",
        ),
        (
            "arena (--arena)",
            laid["arena_bytes"],
            f"{laid['arena_experts']:,} experts, {laid['resident_share']:.0%} of all in memory",
        ),
        ("page cache for Engram rows", laid["engram_page_cache_bytes"], "at least"),
    ]
    lines = [f"{facts['model']} on this machine. All of this is predicted, nothing is measured."]
    lines += [f"  {note}" for note in facts["notes"]]
    lines += [f"  hit rates: {facts['hits_from']}", "", "What fits where"]
    lines += [
        f"  {name:<30} {format_size(n_bytes):>10}  {note}"
        for name, n_bytes, note in places
        if n_bytes
    ]
    lines += ["", f"{'Decode':<8}{'tokens/s':>10}{'hits':>8}  a token's time"]
    for name in ("cold", "warm"):
        lines.append(_rate_line(name, facts[name]))
    lines += ["", f"{'Prompt of':<12}{'cold':>10}{'warm':>10}  to the first token"]
    for row in facts["first_token"]:
        times = f"{_seconds(row['cold_s']):>10}{_seconds(row['warm_s']):>10}"
        lines.append(f"{row['prompt_tokens']:<12,}{times}  in chunks of {facts['chunk']}")
    lines += ["", "Warm decode with one thing more"]
    for row in facts["what_if"]:
        rate = f"{row['tokens_per_second']:>10.2f} tokens/s, {row['gain'] - 1:+.0%}"
        lines.append(f"  {row['change']:<52}{rate}")
    sys.stdout.write("\n".join(lines) + "\n")


def _rate_line(name: str, rate: dict[str, Any]) -> str:
    parts = ", ".join(
        f"{part} {rate[part + '_ms']:.1f} ms"
        for part in ("compute", "copies", "disk")
        if rate[part + "_ms"]
    )
    head = f"{name:<8}{rate['tokens_per_second']:>10.2f}{rate['hit_rate']:>8.1%}"
    return f"{head}  {parts}; limit: {rate['limit']}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.1f} min"
