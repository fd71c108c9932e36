"""`headrace verify --runtime`: every way to decode on this machine gives the same bits, or not.

Runs the matrix of compute/graph/exactness.py on a model: modes, device cache sizes, and a few
tokens that are computed both ways. A daemon that is started here gets an arena for half of the
experts, so that misses occur. Exit status 1 where anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from compute.config import ComputeConfig, add_config_arguments, load_config
from protocol.host_memory import host_memory

if TYPE_CHECKING:
    from compute.experts.device_experts import DeviceExperts
    from compute.graph.exactness import Outcome
    from compute.model.model import Model
    from protocol.files.checkpoint import Checkpoint

    from .children import DaemonInUse

DEFAULT_TOKENS = 64
FIRST_S = 20.0  # of the first way, the slowest of sixteen: so all of them take a few minutes
MOST_TOKENS = 4096
N_PROMPT = 3
CPU_CACHE_BYTES = 4 << 30  # most bytes of a device cache where the CPU is the device
DIFFERS = 1
OPTIONS = (
    "model",
    "precision",
    "device",
    "threads",
    "device_cache",
    "arena",
    "read_threads",
    "runtime_dir",
    "daemon_wait_s",
)
COLUMNS = "{:8} {:>12} {:>7} {:9} {:9} {:>8} {:>9}  {}"


def add_runtime_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--runtime` and what belongs to it."""
    parser.add_argument(
        "--runtime", action="store_true",
        help="compare the ways to decode instead: modes and device cache sizes, bit by bit",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", metavar="N", type=int,
        help=f"with --runtime: tokens of each way (default: {DEFAULT_TOKENS}, or as many as the "
        f"first way decodes in {FIRST_S:g} s)",
    )  # fmt: skip
    add_config_arguments(parser, OPTIONS)


def run_runtime(args: argparse.Namespace) -> int:
    """Run the matrix, print a line a case; 1 where one differs."""
    from compute.load import load_model
    from protocol.errors import ConfigError
    from protocol.files.checkpoint import open_checkpoint, resolve_model

    from .children import daemon_in_use

    n_tokens = DEFAULT_TOKENS if args.tokens is None else args.tokens
    seconds = FIRST_S if args.tokens is None else math.inf
    config = load_config(args, os.environ)
    checkpoint = open_checkpoint(resolve_model(config.model))
    most = min(MOST_TOKENS, checkpoint.config.max_positions - N_PROMPT)
    if not 1 <= n_tokens <= most:
        raise ConfigError(f"--tokens: {n_tokens} is not a number from 1 to {most}")
    if config.arena is None:
        config = replace(config, arena=_half_of_the_experts(checkpoint))
    with daemon_in_use(config, checkpoint.path, os.environ) as daemon:
        model = load_model(checkpoint, config)
        outcomes = _compare(checkpoint, config, model, daemon, n_tokens, seconds, as_json=args.json)
    differing = [outcome for outcome in outcomes if outcome.difference]
    if args.json:
        rows = [asdict(outcome) for outcome in outcomes]
        sys.stdout.write(json.dumps({"cases": rows, "n_different": len(differing)}) + "\n")
    else:
        sys.stdout.write(f"{len(outcomes)} ways, {len(differing) or 'none'} different\n")
    return DIFFERS if differing else 0


def _compare(
    checkpoint: Checkpoint,
    config: ComputeConfig,
    model: Model,
    daemon: DaemonInUse,
    n_tokens: int,
    seconds: float,
    *,
    as_json: bool,
) -> list[Outcome]:
    from compute.assembly import find_mode
    from compute.graph.exactness import run_matrix, sizes_of

    find_mode(checkpoint, replace(config, graph="segment"), model)  # refuses what has no launches

    @contextlib.contextmanager
    def open_experts(n_device: int) -> Iterator[DeviceExperts]:
        with _experts(checkpoint, config, model, daemon, n_device) as experts:
            yield experts

    n_told = 0

    def tell(outcome: Outcome) -> None:
        nonlocal n_told
        if not as_json:
            sys.stdout.write(_line(outcome, "same" if n_told else "reference") + "\n")
            sys.stdout.flush()
        n_told += 1

    own = checkpoint.config
    if not as_json:
        sys.stdout.write(
            COLUMNS.format(
                "mode", "device cache", "tokens", "ids", "streams", "misses", "tokens/s", "result"
            )
            + "\n"
        )
    picked = random.Random(0)
    prompt = [own.bos_id, *(picked.randrange(own.vocab_size) for _ in range(N_PROMPT - 1))]
    return run_matrix(
        model,
        open_experts,
        sizes=sizes_of(own.n_keys, own.top_k, _most_slots(checkpoint, config, model)),
        n_tokens=n_tokens,
        prompt=prompt,
        seconds=seconds,
        tell=tell,
    )


@contextlib.contextmanager
def _experts(
    checkpoint: Checkpoint,
    config: ComputeConfig,
    model: Model,
    daemon: DaemonInUse,
    n_device: int,
) -> Iterator[DeviceExperts]:
    """Experts on a connection of their own, with a device cache of so many slots."""
    import torch

    from compute.assembly import make_experts
    from compute.connecting import connect_engine
    from compute.experts.request_io import Waiting

    wait_s = config.daemon_wait_s
    waiting = Waiting(daemon_wait_s=wait_s, tend=daemon.tend, attached=daemon.attached)
    with connect_engine(daemon.runtime_dir, checkpoint, wait_s, daemon.tend) as client:
        experts = make_experts(checkpoint, client, waiting, n_device, model.device)
        try:
            yield experts
        finally:
            experts.close()
            experts.places.release()  # the next one needs its room, and this one is still held
            if model.device.type == "cuda":
                torch.cuda.empty_cache()


def _most_slots(checkpoint: Checkpoint, config: ComputeConfig, model: Model) -> int:
    from compute.assembly import find_device_slots
    from compute.load import find_context

    if model.device.type == "cpu" and config.device_cache is None:
        config = replace(config, device_cache=CPU_CACHE_BYTES)
    return find_device_slots(checkpoint, config, model, find_context(checkpoint, config))


def _half_of_the_experts(checkpoint: Checkpoint) -> int | None:
    """Bytes of the smallest arena that keeps half of the experts, and that the daemon accepts.

    None where its default is less.
    """
    from .checkpoint_facts import size_for

    n_bytes = size_for(checkpoint, checkpoint.config.n_keys // 2)
    return n_bytes if n_bytes <= host_memory().own_bytes // 2 else None


def _line(outcome: Outcome, good: str) -> str:
    case = outcome.case
    rate = outcome.n_tokens / outcome.seconds if outcome.seconds > 0 else 0.0
    result = outcome.difference or good
    return COLUMNS.format(
        case.mode, case.n_device, outcome.n_tokens, outcome.ids, outcome.streams,
        outcome.n_misses, f"{rate:.1f}", result,
    )  # fmt: skip
