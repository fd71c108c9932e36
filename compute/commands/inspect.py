"""`headrace inspect`: what a checkpoint is, its layer roles, its bytes, and what fits where.

Reads headers and the config alone, never a weight; starts no daemon.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import groupby
from typing import TYPE_CHECKING, Any

from protocol.sizes import format_size

if TYPE_CHECKING:
    from rich.table import Table

KIND_NAMES = {"official": "Official checkpoint", "pack": "Expert pack", "gguf": "GGUF"}
KIND_TEXT = {
    "expert": "routed experts, read by the daemon",
    "engram": "Engram tables, read by the daemon",
    "dense": "everything that compute loads",
    "skipped": "vision, draft stages: left alone",
    "headers": "headers, indices and padding",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model and the form of the output."""
    parser.add_argument("model", metavar="MODEL", help="model directory, .gguf file, or demo")
    parser.add_argument("--json", action="store_true", help="print one object as the last line")


def run(args: argparse.Namespace) -> int:
    """Open and check the checkpoint, print what it holds."""
    from protocol.files.checkpoint import open_checkpoint, resolve_model

    from .checkpoint_facts import checkpoint_facts
    from .machine_memory import machine_memory

    checkpoint = open_checkpoint(resolve_model(args.model), incomplete=True)
    facts = checkpoint_facts(checkpoint, machine_memory())
    if args.json:
        sys.stdout.write(json.dumps(facts) + "\n")
    else:
        _print(facts)
    return 0


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(f"[bold]{_escaped(facts['directory'])}[/bold]")
    console.print(
        f"DeepSeek-V4.1 text model of {_count(facts['n_parameters'])} weights, "
        f"{_count(facts['n_engram_parameters'])} more in Engram tables: "
        f"{facts['n_layers']} layers of {facts['n_experts']} experts, {facts['top_k']} picked, "
        f"hidden size {facts['hidden_size']}, {facts['vocab_size']} ids, "
        f"up to {facts['max_positions']} positions."
    )
    console.print(
        f"{KIND_NAMES[facts['kind']]}: {facts['n_shards']} shards, {facts['n_tensors']} tensors, "
        f"all of the right dtype and shape; fingerprint {facts['fingerprint']}."
    )
    for note in facts["notes"]:
        console.print(_escaped(note))
    for table in (_layers(facts), _kinds(facts), _experts(facts), _packs(facts), _arenas(facts)):
        console.print()
        console.print(table)
    console.print(_memory(facts["memory"]))


def _count(number: int) -> str:
    for power, name in ((10**9, "billion"), (10**6, "million")):
        if number >= power:
            return f"{number / power:.3g} {name}"
    return str(number)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _table(title: str, *columns: str) -> Table:
    """A table whose columns are right-aligned where the name begins with '>'."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for name in columns:
        table.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left")
    return table


def _layers(facts: dict[str, Any]) -> Table:
    table = _table(
        "Layer roles", ">layers", ">ratio", ">rows of", ">selection of", "owns", "beside"
    )
    own_name = object()

    def role(layer: dict[str, Any]) -> list[Any]:
        itself = layer["layer"]
        sources = [
            own_name if s == itself else s for s in (layer["rows_from"], layer["selection_from"])
        ]
        return [layer["ratio"], *sources, layer["own"], _beside(layer)]

    for (ratio, rows, selection, own, beside), group in groupby(facts["layers"], key=role):
        numbers = [layer["layer"] for layer in group]
        first, last = numbers[0], numbers[-1]
        sources = [
            "-" if s is None else "own" if s is own_name else str(s) for s in (rows, selection)
        ]
        span = str(first) if first == last else f"{first}-{last}"
        table.add_row(span, str(ratio), *sources, ", ".join(own), beside)
    return table


def _beside(layer: dict[str, Any]) -> str:
    parts = []
    if layer["engram_table"] is not None:
        parts.append(f"Engram table {layer['engram_table']}")
    if layer["publishes_candidates"]:
        parts.append("publishes candidate blocks")
    if layer["masked_by_candidates"]:
        parts.append("selects among candidates")
    return ", ".join(parts)


def _kinds(facts: dict[str, Any]) -> Table:
    table = _table("Bytes by kind", "kind", ">size", ">bytes", ">share", "what")
    kinds, total = facts["bytes_by_kind"], facts["file_bytes"]
    for kind, n_bytes in kinds.items():
        share = f"{n_bytes / total:.1%}"
        table.add_row(kind, format_size(n_bytes), f"{n_bytes:,}", share, KIND_TEXT[kind])
    table.add_row("all", format_size(total), f"{total:,}", "100.0%", "the shards")
    return table


def _experts(facts: dict[str, Any]) -> Table:
    table = _table("Units of reading", "unit", ">size", ">bytes", "note")
    expert, token = facts["expert"], facts["token"]
    pieces = ", ".join(f"{name} {n_bytes:,}" for name, n_bytes in expert["pieces"].items())
    rows = [("expert", expert["bytes"], f"{facts['formats'][0]['format']}: {pieces}")]
    if len(facts["formats"]) > 1:
        rows = [
            ("expert", row["expert_bytes"], f"{row['format']}, layers {row['layers']}")
            for row in facts["formats"]
        ]
    rows += [
        ("slot", expert["slot_bytes"], "one expert in the arena"),
        ("token, experts", token["expert_bytes"], "when every pick is a miss"),
        ("token, Engram", token["engram_bytes"], "rows of all tables"),
    ]
    rows += [
        (
            f"Engram table {t['table']}",
            t["bytes"],
            f"{t['n_rows']:,} rows of {t['row_bytes']} bytes, {t['format']}",
        )
        for t in facts["engram_tables"]
    ]
    for name, n_bytes, note in rows:
        table.add_row(name, format_size(n_bytes), f"{n_bytes:,}", note)
    return table


def _packs(facts: dict[str, Any]) -> Table:
    table = _table("What pack would give", "--experts", ">record", ">experts in all", "note")
    for row in facts["packs"]:
        if "refused" in row:
            table.add_row(row["experts"], "-", "-", row["refused"].partition(": ")[2])
            continue
        note = "the same bytes" if row["same_bytes"] else f"converted to {row['format']}"
        name = "not given" if row["experts"] == "source" else row["experts"]
        table.add_row(name, f"{row['record_bytes']:,}", format_size(row["bytes"]), note)
    return table


def _arenas(facts: dict[str, Any]) -> Table:
    table = _table(
        "What fits where", "arena of", ">size", ">--arena", ">slots", ">experts", "fits here"
    )
    for row in facts["arenas"]:
        fits = "yes" if row["fits"] else "no"
        size, share = format_size(row["bytes"]), f"{row['resident_share']:.1%}"
        table.add_row(row["arena"], size, str(row["bytes"]), str(row["n_slots"]), share, fits)
    dense = facts["bytes_by_kind"]["dense"]
    places = ", ".join(facts["dense_fits_on"]) or "nowhere here"
    table.caption = (
        f"Dense weights as stored, {format_size(dense)}, fit on: {places}. "
        "Engram rows stay on disk."
    )
    table.caption_justify = "left"
    return table


def _memory(memory: dict[str, Any]) -> str:
    text = (
        f"This machine: {format_size(memory['available_bytes'])} of "
        f"{format_size(memory['total_bytes'])} available"
    )
    if memory["limit_bytes"] is not None:
        text += f", limited to {format_size(memory['limit_bytes'])}"
    gpus = [
        f"{gpu['name']} with {format_size(gpu['n_bytes']) if gpu['n_bytes'] else 'shared memory'}"
        for gpu in memory["gpus"]
    ]
    return f"{text}; {', '.join(gpus) or 'no NVIDIA GPU'}."
