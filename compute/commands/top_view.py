"""What `headrace top` draws of a server's state: figures, the map of experts, the requests."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.layout import Layout
from rich.table import Table
from rich.text import Text

from protocol.sizes import format_size

MAP_LINES = 20
_MAP_MARGIN = 12
_SHADES = " ░▒▓█"
_BAR = 30
_WIDE = 100  # columns


class View:
    """Draws state after state; rates are of the time between two."""

    def __init__(self) -> None:
        self._before: tuple[float, Mapping[str, Any]] | None = None
        self._last: list[RenderableType] = []

    def of(self, state: Mapping[str, Any], width: int, now: float) -> Group:
        """Return a picture of `state`, seen at `now` (seconds, monotonic)."""
        compute = state["compute"]
        title = "headrace" if compute is None else f"headrace on {compute.get('device', '?')}"
        lines: list[RenderableType] = [Text(f"{title}: {state['model']}", style="bold")]
        if compute is None:
            lines.append(Text(f"compute is away: {state['problem']}", style="red"))
        else:
            lines.append(self._figures(state, now))
        if state["tiers"] is not None:
            lines += _tiers(state["tiers"], compute or {})
            lines += [Text(line) for line in heat_lines(state["tiers"]["rows"], width)]
        lines.append(Text(f"time: {state['together']['why']}"))
        lines.append(_requests(state["requests"], width))
        self._last = lines
        return Group(*lines)

    def lost(self, why: str) -> Group:
        """Return the last picture with why there is no newer one."""
        return Group(Text(why, style="red"), *self._last[1:])

    def _figures(self, state: Mapping[str, Any], now: float) -> Text:
        compute = state["compute"]
        told = [f"{compute['state']}", f"{compute.get('n_waiting', 0)} waiting"]
        ended = [one for one in state["requests"] if one["end"] != "running"]
        for name in ("decode", "prefill"):
            rates = [one[f"{name}_tokens_per_second"] for one in ended]
            rate = next((rate for rate in rates if rate), None)
            told.append(f"{name} " + ("-" if rate is None else f"{rate:.1f} tokens/s"))
        before, self._before = self._before, (now, compute)
        if before is not None and "hits" in compute and compute["hits"] >= before[1]["hits"]:
            since = {name: compute[name] - before[1][name] for name in ("hits", "misses")}
            n_read = max(0, compute["bytes_read"] - before[1]["bytes_read"])
            seconds = max(now - before[0], 1e-9)
            told.append(f"{format_size(int(n_read / seconds))}/s read")
            picks = sum(since.values())
            told.append(f"hits {100 * since['hits'] / picks:.1f} %" if picks else "no picks")
        elif "hits" in compute:
            told.append(f"{format_size(int(compute['bytes_read']))} read so far")
        return Text(", ".join(told))


def on_screen(picture: Group, leaves: str) -> Layout:
    """Return a picture for a whole screen, cut to it, with how to leave in the last line."""
    layout = Layout()
    layout.split_column(Layout(picture), Layout(Text(leaves, style="dim"), size=1))
    return layout


def heat_lines(rows: Sequence[str], width: int, n_lines: int = MAP_LINES) -> list[str]:
    """Return the map of experts: a line some layers, a character some experts, darker the more.

    rows   a digit an expert, a row a layer; 0 is not in memory
    """
    if not rows or not rows[0]:
        return []
    layers = math.ceil(len(rows) / n_lines)
    experts = math.ceil(len(rows[0]) / max(1, width - _MAP_MARGIN))
    lines = []
    for first in range(0, len(rows), layers):
        taken = rows[first : first + layers]
        shades = []
        for left in range(0, len(rows[0]), experts):
            cells = "".join(row[left : left + experts] for row in taken)
            share = (len(cells) - cells.count("0")) / len(cells)
            shades.append(_SHADES[math.ceil(share * (len(_SHADES) - 1))])
        name = f"{first}" if layers == 1 else f"{first}-{first + len(taken) - 1}"
        lines.append(f"{name:>7} │{''.join(shades)}│")
    return lines


def _tiers(tiers: Mapping[str, Any], compute: Mapping[str, Any]) -> list[RenderableType]:
    """A line a tier: its share of all experts, and their bytes."""
    counts = tiers["experts"]
    whole, slot_bytes = sum(counts.values()) or 1, int(compute.get("slot_bytes", 0))
    lines: list[RenderableType] = []
    for name in ("device", "arena", "disk"):
        n_experts = counts[name]
        if name == "device" and not n_experts:
            continue
        filled = round(_BAR * n_experts / whole)
        size = format_size(n_experts * slot_bytes)
        bar = "█" * filled + "·" * (_BAR - filled)
        lines.append(Text(f"{name:>7} │{bar}│ {n_experts} experts, {size}"))
    return lines


_COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "began": lambda one: time.strftime("%H:%M:%S", time.localtime(one["began"])),
    "path": lambda one: one["path"].removeprefix("/v1/"),
    "end": lambda one: one["end"],
    "prompt": lambda one: str(one["prompt_tokens"]),
    "cached": lambda one: str(one["cached_tokens"]),
    "new": lambda one: str(one["new_tokens"]),
    "seconds": lambda one: f"{one['seconds']:.2f}",
    "decode/s": lambda one: f"{one['decode_tokens_per_second']:.1f}",
    "misses": lambda one: str(one["misses"]),
    "read": lambda one: format_size(int(one["bytes_read"])),
    "most in": lambda one: one["most"] or "-",
}
_LEFT = ("began", "path", "end", "most in")
_ROOM_ONLY = ("began", "cached", "misses")  # left out of a narrow terminal


def _requests(requests: Sequence[Mapping[str, Any]], width: int) -> Table:
    table = Table(box=None, pad_edge=False)
    names = [name for name in _COLUMNS if width >= _WIDE or name not in _ROOM_ONLY]
    for name in names:
        table.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
    for one in requests:
        table.add_row(*(_COLUMNS[name](one) for name in names))
    return table
