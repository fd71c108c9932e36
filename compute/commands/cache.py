"""`headrace cache`: what the expert daemon's cache holds; to refill, resize and mend it.

Talks to a daemon that runs; starts none.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.errors import ConfigError, DaemonLost
from protocol.sizes import format_size, parse_size

from .terminal import Display

if TYPE_CHECKING:
    from rich.table import Table

    from protocol.wire.client import ExpertClient

HELLO_MS = 3000
N_HOTTEST = 6
RESIZE_S = 600.0
TROUBLED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is to be done and where the daemon is."""
    _add_place(parser, default=None)
    parser.add_argument("--json", action="store_true", help="print one object as the last line")
    parser.add_argument(
        "--top", metavar="N", type=int, default=N_HOTTEST, help="experts shown a layer"
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    warm = actions.add_parser("warm", help="load what the saved hot list names")
    _add_place(warm, default=argparse.SUPPRESS)
    warm.add_argument("--json", action="store_true", default=argparse.SUPPRESS)
    lift = actions.add_parser("unquarantine", help="read experts again whose bytes were wrong")
    lift.add_argument(
        "keys", metavar="LAYER:EXPERT", nargs="*", help="which ones (default: all in quarantine)"
    )
    _add_place(lift, default=argparse.SUPPRESS)
    resize = actions.add_parser("resize", help="make the arena larger or smaller")
    resize.add_argument("size", metavar="SIZE", help='such as "64GiB", up to the --arena-max')
    _add_place(resize, default=argparse.SUPPRESS)
    resize.add_argument("--json", action="store_true", default=argparse.SUPPRESS)
    resize.add_argument(
        "--wait", metavar="SECONDS", type=float, default=RESIZE_S, help="how long to wait for it"
    )


def _add_place(parser: argparse.ArgumentParser, default: str | None) -> None:
    parser.add_argument(
        "--runtime-dir", metavar="DIR", default=default, help="where the daemon's sockets are"
    )


def run(args: argparse.Namespace) -> int:
    """Do it and return the exit status."""
    with _connected(args) as client:
        if args.action == "warm":
            from .cache_warm import warm

            return warm(client, Display(quiet=args.json), as_json=args.json)
        if args.action == "unquarantine":
            return _unquarantine(client, args)
        if args.action == "resize":
            return _resize(client, args)
        return _show(client, args)


@contextmanager
def _connected(args: argparse.Namespace) -> Iterator[ExpertClient]:
    from protocol.runtime_dir import default_runtime_dir
    from protocol.wire.client import ExpertClient

    given = args.runtime_dir
    place = Path(given).expanduser().absolute() if given else default_runtime_dir(os.environ)
    try:
        client = ExpertClient(place, hello_ms=HELLO_MS)
    except DaemonLost as error:
        raise DaemonLost(
            f"no daemon answers in {place}; start one or give --runtime-dir"
        ) from error
    with client:
        yield client


def _unquarantine(client: ExpertClient, args: argparse.Namespace) -> int:
    from .cache_facts import quarantined_keys

    keys = [_key(text) for text in args.keys] or quarantined_keys(client.stats())
    shape = client.arena.layout
    for layer, expert in keys:
        if layer >= shape.n_layers or expert >= shape.n_experts:
            raise ConfigError(
                f"{layer}:{expert}: the model has {shape.n_layers} layers of "
                f"{shape.n_experts} experts"
            )
    text = client.unquarantine(keys) if keys else "nothing is in quarantine"
    Display().line(text)
    return 0


def _key(text: str) -> tuple[int, int]:
    layer, colon, expert = text.partition(":")
    if not (colon and layer.isdecimal() and expert.isdecimal()):
        raise ConfigError(f"{text!r} is not LAYER:EXPERT, such as 3:117")
    return int(layer), int(expert)


def _resize(client: ExpertClient, args: argparse.Namespace) -> int:
    n_bytes = parse_size(args.size, "SIZE")
    if not 0 < args.wait <= 86_400:
        raise ConfigError(f"--wait is {args.wait:g}, wanted seconds, at most a day")
    answer = client.resize(n_bytes, timeout_ms=args.wait * 1000)
    text = f"the arena has {format_size(answer.n_bytes)} now"
    Display(quiet=args.json).line(f"{text}: {answer.text}" if answer.text else text)
    if args.json:
        sys.stdout.write(json.dumps({"bytes": answer.n_bytes, "text": answer.text}) + "\n")
    return TROUBLED if answer.text else 0


def _show(client: ExpertClient, args: argparse.Namespace) -> int:
    from .cache_facts import cache_facts

    facts = cache_facts(client, max(0, args.top))
    if args.json:
        sys.stdout.write(json.dumps(facts) + "\n")
    else:
        _print(facts)
    return 0


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    daemon, arena, device = facts["daemon"], facts["tiers"]["arena"], facts["tiers"]["device"]
    console.print(f"[bold]{escape(str(daemon['model']))}[/bold]")
    console.print(
        f"expert daemon {daemon['pid']}, up {daemon['uptime_s']:.0f} s, generation "
        f"{daemon['generation']}, policy {daemon['policy']}, {daemon['read_mode']} reads"
    )
    console.print(
        f"arena: {arena['resident']} of {arena['of_experts']} experts in {arena['slots']} slots, "
        f"{format_size(arena['bytes'])}; on the device: {device['resident']}"
    )
    console.print()
    console.print(_hit_table(facts))
    for line in facts["troubles"]:
        console.print(f"[red]{escape(line)}[/red]", soft_wrap=True)
    console.print()
    console.print(_layer_table(facts["layers"]))


def _hit_table(facts: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table("", "picks", "hits", "misses", "hit rate", "read", "ms a read")
    table.columns[0].no_wrap = True
    for name, label in (("since_start", "this daemon"), ("arena_life", "this arena")):
        one = facts[name]
        table.add_row(
            label,
            str(one["picks"]),
            str(one["hits"]),
            str(one["misses"]),
            "-" if one["hit_rate"] is None else f"{100 * one['hit_rate']:.2f} %",
            f"{one['reads']} ({format_size(one['bytes_read'])})",
            "-" if one["read_ms"] is None else f"{one['read_ms']:.2f}",
        )
    return table


def _layer_table(layers: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table("layer", "in the arena", "hottest experts (score)")
    for one in layers:
        hottest = ", ".join(f"{e['expert']} ({e['score']:g})" for e in one["hottest"])
        table.add_row(str(one["layer"]), str(one["resident"]), hottest)
    return table
