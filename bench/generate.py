"""Speed of one model on this machine: loading, prefill, decode, and each as a share of a ceiling.

    python bench/generate.py [--quick] [--model DIR] [--precision NAME] [--arena SIZE]

Starts an expert daemon of its own in a private directory, warms up, takes medians, and prints one
JSON object as the last line. The ceiling is measured in the same run: one vector times as many fp32
weights as a token uses, in a matrix too large for the caches. Interpreter start and imports are
not counted. Greedy sampling over the demo's held-out text; stop ids are ignored.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from compute.commands.opening import Opened, opened
from compute.commands.terminal import Display
from compute.config import PRECISIONS, ComputeConfig
from compute.experts import miss_client as _imported_before_the_clock_starts  # noqa: F401
from compute.sampler import Sampling
from compute.session import Finished, Request
from protocol.files.checkpoint import resolve_model
from protocol.sizes import parse_size

CEILING_SHAPE = (8192, 4096)  # 128 MiB of f32


def main() -> int:
    """Measure, print a line for each figure and the object last."""
    args = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="hr-", dir="/tmp") as directory:
        config = ComputeConfig(
            model=args.model,
            precision=args.precision,
            chunk=args.chunk,
            arena=args.arena and parse_size(args.arena, "--arena"),
            runtime_dir=Path(directory),
            state_dir=Path(directory),
        )
        found = measure(config, args)
    for name, value in found.items():
        print(f"{name:32} {value}")
    print(json.dumps(found))
    return 0


def parse_arguments() -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(description="Measure loading, prefill and decode.")
    parser.add_argument("--model", default="demo", metavar="DIR")
    parser.add_argument("--precision", default="highway", choices=PRECISIONS)
    parser.add_argument("--arena", metavar="SIZE", help="default: the daemon's own")
    parser.add_argument("--chunk", type=int, default=ComputeConfig().chunk)
    parser.add_argument("--prompt-tokens", type=int, default=640)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one repeat of everything, shorter")
    args = parser.parse_args()
    if args.quick:
        args.new_tokens, args.repeats = 24, 1
    return args


def measure(config: ComputeConfig, args: argparse.Namespace) -> dict[str, Any]:
    """Return every figure of one configuration."""
    load_s = []
    for _ in range(args.repeats):
        own = dataclasses.replace(config, runtime_dir=Path(tempfile.mkdtemp(dir=config.state_dir)))
        started = time.perf_counter()
        with opened(own, Display(quiet=True)):
            load_s.append(time.perf_counter() - started)
    with opened(config, Display(quiet=True)) as ready:
        ids = text_ids(ready, args.prompt_tokens)
        short = ids[:32]
        warm = generate(ready, ids, 8)
        prefills = [generate(ready, ids, 1) for _ in range(args.repeats)]
        decodes = [generate(ready, short, args.new_tokens) for _ in range(args.repeats)]
        ceiling = tokens_per_second_of_reading_weights(ready)
    prefill = statistics.median(run.prefill_per_second for run in prefills)
    decode = statistics.median(run.tokens_per_second for run in decodes)
    return {
        "model": config.model,
        "precision": config.precision,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load_s": round(statistics.median(load_s), 3),
        "prompt_tokens": len(ids),
        "prefill_tokens_per_second": round(prefill, 1),
        "decode_tokens_per_second": round(decode, 2),
        "prefill_over_decode": round(prefill / decode, 2),
        "ceiling_tokens_per_second": round(ceiling, 1),
        "decode_over_ceiling": round(decode / ceiling, 3),
        "first_pass_misses": warm.io.misses,
        "misses": decodes[-1].io.misses,
        "stall_ms": round(decodes[-1].io.stall_ms, 2),
    }


def text_ids(ready: Opened, n_tokens: int) -> list[int]:
    """Return the first ids of the demo's held-out text, the begin id before them."""
    text = (resolve_model("demo") / "heldout.txt").read_text(encoding="utf-8")
    ids = ready.tokenizer.encode(text[: n_tokens * 8])
    return [ready.bos_id, *ids][:n_tokens]


def generate(ready: Opened, ids: list[int], n_new: int) -> Finished:
    """Run one greedy request to its end."""
    request = Request(prompt_ids=ids, sampling=Sampling(temperature=0.0), max_tokens=n_new)
    *_, last = ready.engine.generate(request)
    assert isinstance(last, Finished)
    return last


def tokens_per_second_of_reading_weights(ready: Opened) -> float:
    """Return how often a second this machine can multiply one vector by a token's weights."""
    matrix, vector = torch.randn(CEILING_SHAPE), torch.randn(CEILING_SHAPE[1])
    out = torch.empty(CEILING_SHAPE[0])
    times = []
    for _ in range(9):
        started = time.perf_counter()
        torch.mv(matrix, vector, out=out)
        times.append(time.perf_counter() - started)
    weights_per_second = matrix.numel() / statistics.median(times)
    return weights_per_second / weights_of_a_token(ready)


def weights_of_a_token(ready: Opened) -> int:
    """Return how many weights a token is multiplied by: the dense ones and its picked experts'."""
    config = ready.checkpoint.config
    expert = 3 * config.hidden_size * config.expert_width
    dense = sum(weight_count(ready, name) for name in ready.checkpoint.tensors)
    return dense + config.n_layers * config.top_k * expert


def weight_count(ready: Opened, name: str) -> int:
    """Return a dense matrix's number of values, 0 for anything else."""
    entry = ready.checkpoint.tensors[name]
    leave_out = ".experts." in name or "engram.embed" in name or name.startswith("embed")
    if leave_out or len(entry.shape) != 2 or entry.dtype == "F8_E8M0":
        return 0
    return entry.shape[0] * entry.shape[1]


if __name__ == "__main__":
    sys.exit(main())
