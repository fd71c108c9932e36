"""A pick that only the arena holds: read in place and copied behind the step, or copied at once.

    python bench/promote.py [--quick] [--layers N] [--experts N] [--dir DIR]

On a GPU: random dense weights of the released sizes; experts of the released size in the arena of
a daemon, all of them, and in the device cache. Before each token so many keys, each in a layer of
its own, leave the device cache, and routers are biased to pick them. In place, as the engine does
it: the layers read them over the bus and go on, and copies to the device begin behind the token.
At once: a pick that is not on the device raises the header's flag, its copy is launched, and the
layers from there on run again. Steps follow each other without a wait for what is copied behind
them. Then the device cache is emptied, and tokens that pick at random fill it, by some copies at a
time. Without a GPU the demo, whose figures say nothing of a GPU's.

Prints a table and one JSON object as the last line: milliseconds a step.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.chosen_misses import Bench, ForgetfulExperts, Key  # noqa: E402
from bench.miss_rate import bench_of, make, prepared  # noqa: E402
from compute.experts.device_cache import keys_of  # noqa: E402
from compute.experts.miss_client import Hints  # noqa: E402
from compute.model.model import Model  # noqa: E402
from protocol.files.checkpoint import Checkpoint  # noqa: E402
from protocol.wire.client import ExpertClient  # noqa: E402
from tests.support.running_daemon import daemon_process  # noqa: E402

RATES = (0, 1, 2, 4, 8, 16)
FILLING = (8, 16, 32, 64, 8)  # copies at a time into an empty cache; the first one captures
FILL_TOKENS = 40


class CopiedAtOnce(ForgetfulExperts):
    """The device's table names slots of the device cache alone; the rest is copied when picked."""

    def fetch(
        self, layer: int, picks: Sequence[int], rest: Callable[[], Hints] = lambda: ()
    ) -> bool:
        """Launch the copies of the picks that the arena has, behind what the device does."""
        del rest
        keys = keys_of([layer] * len(picks), picks, self.places.n_experts)
        copies = self._copies
        for promotion in self.cache.begin(keys[self.cache.slot_of[keys] < 0], len(keys)):
            if promotion.victim >= 0:
                copies.moved.add(divmod(promotion.victim, self.places.n_experts))
                self._enter(moved=True)
            copies._begin(promotion)  # noqa: SLF001
        while copies._under_way:  # noqa: SLF001 - the launching stream waits, the host does not
            copies._finish(copies._under_way.pop())  # noqa: SLF001
        self._enter(moved=True)
        return False

    def _choose(self, keys: NDArray[np.int64]) -> None:
        self.cache.use(keys)

    def _entry(self, layer: int, expert: int) -> int:
        key = layer * self.places.n_experts + expert
        return self.places.entry(int(self.cache.slot_of[key]), -1)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Compare two ways to the device cache.")
    parser.add_argument("--quick", action="store_true", help="fewer layers and tokens")
    parser.add_argument("--layers", type=int, default=0, help="16, with --quick 4")
    parser.add_argument("--experts", type=int, default=16, help="of a layer, at least 16")
    parser.add_argument("--dir", default="/var/tmp", help="a directory on the drive to read from")
    args = parser.parse_args()
    args.layers = args.layers or (4 if args.quick else 16)
    n_tokens = 12 if args.quick else 60
    with prepared(args) as (checkpoint, model), torch.inference_mode():
        ways = {"in_place": ForgetfulExperts, "at_once": CopiedAtOnce}
        found = {name: measured(checkpoint, model, kind, n_tokens) for name, kind in ways.items()}
        fills = found["in_place"].pop("fills")
        found["at_once"].pop("fills")
    print("| picks from the arena | in place, then copied, ms | copied at once, ms |")
    print("| --- | --- | --- |")
    for rate, taken in found["in_place"].items():
        print(f"| {rate} | {taken:g} | {found['at_once'][rate]:g} |")
    print(f"\n{FILL_TOKENS} tokens from an empty device cache, ms by copies at a time: {fills}")
    print(json.dumps({"layers": model.config.n_layers, **found, "fills_ms": fills}))
    return 0


def measured(
    checkpoint: Checkpoint, model: Model, kind: type[ForgetfulExperts], n_tokens: int
) -> dict[str, Any]:
    """Return the median milliseconds of a step at each rate, in one way; and those of filling."""
    arena = (model.config.n_keys + 2 * model.config.top_k) * checkpoint.slice_map.image.slot_bytes
    flags = ("--arena", str(arena + (256 << 20)), "--no-save")
    with (
        tempfile.TemporaryDirectory(prefix="hr-", dir="/tmp") as runtime,
        daemon_process(checkpoint.path, Path(runtime), *flags),
        ExpertClient(runtime, "engine", checkpoint.fingerprint, model.config.top_k) as client,
    ):
        experts = make(checkpoint, model, client, kind)
        try:
            experts.fill()
            assert experts.client.n_slots > model.config.n_keys, "the arena is too small"
            bench = bench_of(experts, model, "segment")
            rates = [rate for rate in RATES if rate <= model.config.n_layers]
            taken = {str(rate): at_rate(bench, rate, n_tokens) for rate in rates}
            fills = {str(most): filled(bench, most) for most in FILLING}  # the last one of 8 counts
            bench.runner.finish()
            print(f"{kind.__name__}: {experts.n_restored} keys restored", file=sys.stderr)
            return {**taken, "fills": fills}
        finally:
            experts.close()


def at_rate(bench: Bench, n_picks: int, n_tokens: int) -> float:
    """Return the median milliseconds of a step with so many picks that are not on the device."""
    bench.runner.assume_misses(0)
    times = []
    for _ in range(3 * n_tokens):
        keys = forgotten(bench, n_picks)
        token = bench.prepare(keys)
        began = time.perf_counter()
        bench.runner.step(token)
        times.append(time.perf_counter() - began)
    return round(1000 * statistics.median(times[-n_tokens:]), 3)  # the first ones capture


def filled(bench: Bench, n_copies: int) -> float:
    """Return the milliseconds of some tokens' steps that begin with an empty device cache."""
    experts, config = bench.experts, bench.model.config
    bench.runner.finish()
    bench.runner.sequence.reset()  # none of them grows beyond what is captured
    experts._copies._most, experts._copies._most_filling = 8, n_copies  # noqa: SLF001
    for key in np.flatnonzero(experts.cache.slot_of >= 0).tolist():
        experts.forget(*divmod(key, config.n_experts))
    drawn, total = random.Random(0), 0.0
    for _ in range(FILL_TOKENS):
        keys = []
        for layer in range(config.n_layers):
            able = experts.readable(layer)
            keys += [(layer, expert) for expert in drawn.sample(able, config.top_k)]
        token = bench.prepare(keys)
        began = time.perf_counter()
        bench.runner.step(token)
        total += time.perf_counter() - began
    return round(1000 * total, 1)


def forgotten(bench: Bench, n_picks: int) -> list[Key]:
    """Take a key of each of so many layers from the device cache, one that the device may read.

    What the bus had no time to copy back is taken back without a copy, so that no layer runs dry.
    """
    experts, n_layers = bench.experts, bench.model.config.n_layers
    experts.restore({key for keys in bench.recent for key in keys})
    able = {
        layer: sorted({*experts.on_device(layer)} & {*experts.readable(layer)})
        for layer in range(n_layers)
    }
    layers = sorted(bench.drawn.sample([layer for layer in able if able[layer]], n_picks))
    keys = [(layer, bench.drawn.choice(able[layer])) for layer in layers]
    for key in keys:
        experts.forget(*key)
    bench.recent = [bench.recent[-1], keys]
    return keys


if __name__ == "__main__":
    sys.exit(main())
