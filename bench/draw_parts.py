"""Time of drawing an id from 129,280 logits: by the device's launches in a graph, and on the host.

    python bench/draw_parts.py [--repeats N]

Every id that is timed is first compared with the host's. `peaked` logits have a few dozen ids far
above the rest, of `broad` ones top_p keeps thousands, of `flat` ones most. Microseconds are what a
draw adds to a captured step behind the head, its numbers brought from the host's memory included;
milliseconds are the host's own, with the logits' copy from the device or without. Prints one JSON
object as the last line.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.parts_report import report_parts
from bench.timing import seconds
from compute.host_draw import DrawNumbers
from compute.host_draw import draw as host_draw
from compute.sampler import Sampling, draw_numbers
from kernels.bring import bring
from kernels.draw import draw
from kernels.likeliest import likeliest

VOCABULARY, LAUNCHES = 129_280, 24
WISHES = {
    "plain": ("peaked", Sampling()),
    "min_p": ("peaked", Sampling(min_p=0.05)),
    "top_p": ("peaked", Sampling(top_p=0.95)),
    "top_k": ("peaked", Sampling(top_k=40)),
    "top_k_top_p": ("peaked", Sampling(top_k=40, top_p=0.95)),
    "top_p_broad": ("broad", Sampling(top_p=0.9)),
    "top_p_flat": ("flat", Sampling(top_p=0.9)),
}


def rows() -> dict[str, np.ndarray]:
    """Return logits [vocab] f32 by name."""
    rng = np.random.default_rng(0)
    peaked = rng.normal(0, 3, VOCABULARY).astype(np.float32)
    peaked[rng.permutation(VOCABULARY)[:60]] = np.linspace(14, 26, 60)
    broad = rng.normal(0, 3, VOCABULARY).astype(np.float32)
    return {"peaked": peaked, "broad": broad, "flat": broad / np.float32(3)}


def draw_parts(repeats: int) -> dict[str, float]:
    """Return the figures by name; AssertionError where a drawn id is not the host's."""
    given = rows()
    found = {}
    for name, (kind, sampling) in WISHES.items():
        logits = torch.from_numpy(given[kind]).cuda()
        wanted = [draw_numbers(sampling, position) for position in range(8)]
        found[f"draw_{name}_us"] = _on_device(logits, given[kind], wanted, repeats)
        on_host = partial(host_draw, given[kind], wanted[0])
        found[f"host_draw_{name}_ms"] = _on_host(on_host, repeats)
    found["likeliest_us"] = seconds(lambda: likeliest(logits), repeats, copies=LAUNCHES) * 1e6
    found["copy_logits_ms"] = _on_host(lambda: logits.cpu().numpy(), repeats)
    return found


def _on_device(logits: Tensor, row: np.ndarray, wanted: list[DrawNumbers], repeats: int) -> float:
    best, out = likeliest(logits), torch.zeros(2, dtype=torch.int64).pin_memory()
    staged, numbers = torch.zeros(5).long().pin_memory(), torch.zeros(5, device="cuda").long()
    filtered = wanted[0].is_filtered

    def launch() -> None:
        bring(staged, numbers)
        draw(logits, best, numbers, filtered=filtered, out=out)

    for one in wanted:
        staged.numpy().view(np.uint64)[:] = one
        launch()
        torch.cuda.synchronize()
        assert out.tolist() == [host_draw(row, one), 0], one
    return seconds(launch, repeats, copies=LAUNCHES) * 1e6


def _on_host(choose: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(3 * repeats):
        began = time.perf_counter()
        choose()
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times)


if __name__ == "__main__":
    raise SystemExit(report_parts(__doc__, draw_parts, 3))
