"""Tokens a second against misses a token: what a miss costs beyond its own read.

    python bench/miss_rate.py [--quick] [--layers N] [--experts N] [--dir DIR] [--rates N ...]
                              [--plot FILE.svg]

On a GPU: random dense weights of the released sizes, and experts of the released size that a daemon
really reads from a checkpoint under DIR (layers x experts x 18.8 MB, deleted at the end). Without a
GPU the demo, whose figures say nothing of a GPU's. The device cache holds every expert, the arena
as few as may be. Before each token so many keys, drawn at random, each in a layer of its own, are
dropped from the device cache; routers are biased to pick them. Then such requests are sent at the
same pace with nothing else to do: the reads alone. A miss's cost is held to the step without
misses: ratio = (step - reads alone) / step without misses. What the arena gave up before it was
copied to the device is taken back without a copy, and counted as restored.

Prints a table and one JSON object as the last line; gap_share is the share of a step without misses
in which the GPU stands still for more than 5 us, by the profiler, and gap_share_of_tokens that of
ten tokens in a row, each drawn from the logits before it, what lies between two of them included.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.big_shards import tame_scales, write_big_checkpoint  # noqa: E402
from bench.chosen_misses import CONTEXT, Bench, ForgetfulExperts  # noqa: E402
from bench.device_spans import gap_share, gaps_of, spans_of  # noqa: E402
from bench.rate_plot import plot  # noqa: E402
from compute.experts.tiers import ExpertTiers  # noqa: E402
from compute.graph.runner import Runner  # noqa: E402
from compute.load import expert_shapes  # noqa: E402
from compute.model.model import Model  # noqa: E402
from compute.model.sequence import Sequence as ModelSequence  # noqa: E402
from compute.sampler import Sampling  # noqa: E402
from protocol.files.checkpoint import Checkpoint, open_checkpoint, resolve_model  # noqa: E402
from protocol.wire.client import ExpertClient  # noqa: E402
from tests.support.decode_rig import model_of as small_model_of  # noqa: E402
from tests.support.running_daemon import daemon_process, smallest_arena  # noqa: E402

RATES = (0, 1, 2, 4, 8, 16)
QUICK_RATES = (0, 2, 8)
BEGAN = time.perf_counter()


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure what a miss costs.")
    parser.add_argument("--quick", action="store_true", help="fewer layers, rates and tokens")
    parser.add_argument("--layers", type=int, default=0, help="40, with --quick 8")
    parser.add_argument("--experts", type=int, default=24, help="of a layer, at least 16")
    parser.add_argument("--tokens", type=int, default=0, help="of each rate: 60, with --quick 24")
    parser.add_argument("--dir", default="/var/tmp", help="a directory on the drive to read from")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw the rates")
    parser.add_argument("--rates", type=int, nargs="+", help="misses a token, beside none")
    args = parser.parse_args()
    found = run(args)
    show(found)
    if args.plot:
        Path(args.plot).write_text(plot(found["rates"]))
    print(json.dumps(found))
    return 0


def at_rate(n_misses: int, n_layers: int, *, quick: bool) -> dict[str, float]:
    """Return the step with so many misses a token beside the one with none, for another bench."""
    args = argparse.Namespace(
        quick=quick, layers=n_layers, experts=16, tokens=0, dir="/var/tmp", rates=[n_misses]
    )
    found = run(args)
    hits, rate = found["rates"][0], found["rates"][-1]
    names = ("step_ms", "waited_ms", "rest_ms", "reads_ms", "ratio", "tokens_s")
    figures = {f"miss_{name}": float(rate[name]) for name in names}
    return {
        "misses": n_misses,
        "all_hits_step_ms": float(hits["step_ms"]),
        "segment_vs_eager": float(found["segment_vs_eager"]),
        **figures,
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return all figures."""
    args.layers = args.layers or (8 if args.quick else 40)
    args.tokens = args.tokens or (24 if args.quick else 60)
    with contextlib.ExitStack() as stack:
        checkpoint, model = stack.enter_context(prepared(args))
        return measured(checkpoint, model, args)


@contextlib.contextmanager
def prepared(args: argparse.Namespace) -> Iterator[tuple[Checkpoint, Model]]:
    """The checkpoint that the daemon reads and the model that computes."""
    if not torch.cuda.is_available():
        checkpoint = open_checkpoint(resolve_model("demo"))
        yield checkpoint, small_model_of(checkpoint, "cpu")
        return
    from bench.whole_step import config_of, model_of  # noqa: PLC0415 - makes tensors on a GPU

    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=args.dir) as home:
        config = replace(config_of(args.layers), n_experts=args.experts)
        directory = write_big_checkpoint(
            Path(home) / "model",
            n_layers=config.n_layers,
            n_experts=config.n_experts,
            top_k=config.top_k,
            rows_per_column=1000,
        )
        tame_scales(directory)
        say("the checkpoint is written")
        yield open_checkpoint(directory), model_of(config)


def measured(checkpoint: Checkpoint, model: Model, args: argparse.Namespace) -> dict[str, Any]:
    """Return all figures."""
    least = smallest_arena(checkpoint, model.config.top_k)
    spare = 2 * model.config.n_layers * checkpoint.slice_map.image.slot_bytes
    flags = ("--arena", str(least + spare), "--no-save")
    with (
        tempfile.TemporaryDirectory(prefix="hr-", dir="/tmp") as runtime,
        daemon_process(checkpoint.path, Path(runtime), *flags),
        ExpertClient(runtime, "engine", checkpoint.fingerprint, model.config.top_k) as client,
        torch.inference_mode(),
    ):
        experts = make(checkpoint, model, client)
        try:
            experts.fill()
            say("every expert is on the device")
            hits = {mode: without_misses(experts, model, mode, args) for mode in ("eager", "layer")}
            say(f"steps without misses, ms: {hits}")
            gaps = gaps_without_misses(experts, model)
            rates = with_misses(experts, model, args)
        finally:
            experts.close()
    hits["segment"] = rates[0]["step_ms"]
    return {
        "device": "cpu, the demo" if model.device.type == "cpu" else torch.cuda.get_device_name(),
        "layers": model.config.n_layers,
        "experts": model.config.n_experts,
        "hits_ms": hits,
        "segment_vs_eager": round(hits["eager"] / hits["segment"], 3),
        "rates": rates,
        **gaps,
        "restored": experts.n_restored,
        "ratio_at_2": next((rate["ratio"] for rate in rates if rate["misses"] == 2), None),
    }


def make(
    checkpoint: Checkpoint,
    model: Model,
    client: ExpertClient,
    kind: type[ForgetfulExperts] = ForgetfulExperts,
) -> ForgetfulExperts:
    """Return experts of a kind with room for all of them on the device."""
    layouts = checkpoint.slice_map.layouts
    places = ExpertTiers(
        expert_shapes(checkpoint),
        [layout.formats for layout in layouts],
        model.config.n_experts,
        layouts[0].image.slot_bytes,
        model.config.n_keys,
        model.device,
    )
    most = model.config.n_layers  # so that no rate of misses empties the device
    return kind(
        client,
        expert_shapes(checkpoint),
        places,
        most_promoted=most,
        most_promoted_bytes=most * places.slot_bytes,
    )


def bench_of(experts: ForgetfulExperts, model: Model, mode: str) -> Bench:
    """Return a bench in a mode."""
    sequence = ModelSequence(
        model.config, min(CONTEXT, model.config.max_positions), model.device, model.precision
    )
    return Bench(experts, model, Runner(model, sequence, experts, mode=mode), random.Random(0))


def without_misses(
    experts: ForgetfulExperts, model: Model, mode: str, args: argparse.Namespace
) -> float:
    """Return milliseconds of a step that finds all, launched in a mode."""
    bench = bench_of(experts, model, mode)
    times = [bench.token(()) for _ in range(8 + args.tokens)][8:]
    bench.runner.finish()
    return round(1000 * statistics.median(times), 3)


def gaps_without_misses(experts: ForgetfulExperts, model: Model) -> dict[str, float | None]:
    """Return the shares of device gaps over 5 us in steps by segments that find all."""
    if model.device.type != "cuda":
        return {"gap_share": None, "gap_share_of_tokens": None}
    bench = bench_of(experts, model, "segment")
    bench.token(())

    def step() -> None:  # the same picks: nothing but the step itself
        token = bench.drawn.randrange(model.config.vocab_size)
        bench.runner.expect(token)
        bench.runner.step(token)

    def token() -> None:  # as a session does it
        drawn = bench.runner.drawn()
        bench.runner.expect(drawn)
        bench.runner.step(drawn, Sampling(seed=1))

    for _ in range(5):
        step()
    steps = [spans_of(step) for _ in range(10)]
    bench.runner.step(0, Sampling(seed=1))
    for _ in range(5):
        token()
    tokens = spans_of(token, 10)
    bench.runner.finish()
    gaps = ", ".join(f"{gap:.0f} at {at:.0f}" for at, gap in gaps_of(steps[-1]))
    say(f"gaps of a step without misses, us: {gaps}")
    within = statistics.mean(map(gap_share, steps))
    return {"gap_share": round(within, 4), "gap_share_of_tokens": round(gap_share(tokens), 4)}


def with_misses(
    experts: ForgetfulExperts, model: Model, args: argparse.Namespace
) -> list[dict[str, float]]:
    """Return the figures of each rate, by segments."""
    bench, n_layers = bench_of(experts, model, "segment"), model.config.n_layers
    for layer in range(n_layers):  # so that every layer's own graphs are captured
        key = (layer, bench.drawn.choice(experts.only_on_device(layer)))
        experts.forget(*key)
        bench.token([key])
    rates: list[dict[str, float]] = []
    rates_asked = (0, *args.rates) if args.rates else QUICK_RATES if args.quick else RATES
    for n_misses in rates_asked:
        if n_misses > n_layers:
            continue
        n_tokens = max(8, args.tokens * 2 // max(2, n_misses))  # of many misses fewer will do
        settle_on(bench, n_misses)
        hits = rates[0]["step_ms"] / 1000 if rates else 0.0
        steps, stalls, alone = alternating(bench, n_misses, n_tokens, hits)
        # A drive has slow moments: medians of all, taken in turn.
        step, reads = statistics.median(steps), statistics.median(alone)
        rest = statistics.median(step - wait for step, wait in zip(steps, stalls, strict=True))
        hits = hits or step
        rates.append(
            {
                "misses": n_misses,
                "tokens_s": round(len(steps) / sum(steps), 2),
                "step_ms": round(1000 * step, 3),
                "waited_ms": round(1000 * statistics.median(stalls), 3),
                "rest_ms": round(1000 * rest, 3),
                "reads_ms": round(1000 * reads, 3),
                "ratio": round((step - reads) / hits, 3),
            }
        )
        say(f"{rates[-1]}")
    bench.runner.finish()
    return rates


def alternating(
    bench: Bench, n_misses: int, n_tokens: int, hits_s: float
) -> tuple[list[float], list[float], list[float]]:
    """Return seconds of tokens with so many misses, what of them was waited for experts, and of
    such reads alone, in turn with the tokens.
    """
    steps, stalls, alone = [], [], []
    io = bench.experts.io
    for _ in range(n_tokens):
        keys, stalled = bench.forget(n_misses), io.stall_ms
        steps.append(bench.token(keys))
        stalls.append((io.stall_ms - stalled) / 1000)
        bench.token(())  # as before a token with misses: the drive rests as long
        keys = bench.forget(n_misses)
        alone.append(bench.reads_alone(keys, hits_s) if keys else 0.0)
        bench.token(keys)  # they return to the device
    return steps, stalls, alone


def settle_on(bench: Bench, n_misses: int) -> None:
    """Let segments be of the length that suits a rate, and all that it launches be captured.

    A capture takes as long as many tokens, and comes once: the table is of what comes after.
    """
    runner, calm = bench.runner, 0
    runner.assume_misses(n_misses)
    while calm < 3:
        before = runner.counters.captures
        bench.token(bench.forget(n_misses))
        calm = calm + 1 if runner.counters.captures == before else 0


def say(text: str) -> None:
    """Tell on standard error how far it is."""
    print(f"{time.perf_counter() - BEGAN:7.1f} s: {text}", file=sys.stderr, flush=True)


def show(found: dict[str, Any]) -> None:
    """Print the table."""
    print(f"{found['device']}, {found['layers']} layers, all hits in ms: {found['hits_ms']}\n")
    titles = ("misses a token", "tokens a second", "step, ms", "waits in it", "the rest")
    print("| " + " | ".join((*titles, "reads alone", "ratio")) + " |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for rate in found["rates"]:
        names = ("misses", "tokens_s", "step_ms", "waited_ms", "rest_ms", "reads_ms", "ratio")
        print("| " + " | ".join(f"{rate[name]:g}" for name in names) + " |")
    print()


if __name__ == "__main__":
    sys.exit(main())
