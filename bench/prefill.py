"""Speed of a chunk's experts on a GPU, and of whole layers, against what the machine could do.

    python bench/prefill.py [--quick] [--tokens N] [--format fp4] [--sweep] [--profile]

Experts of the released sizes are made on the device, 384 of them, and each token picks six at
random. The ceilings, a kernel that copies, one that only reads, and torch's bf16 product, are
measured in the same run. The roofline is the longer of the times that reading every picked expert
once and multiplying every pair would take at those rates. --sweep tries other tiles, --profile
lists the kernels of the layers. A layer's time is that of the clock on the wall, host and all, and
beside it stands how long the device worked. --format q2k-q3k, q4k or q8_0 measures experts of GGUF
blocks, without layers and other tiles. --gemv N measures layers with chunks of 1, 2 ... N tokens as
well, each by the kernels for chunks and by those for single tokens. Prints one JSON object as the
last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.block_parts import FORMATS, random_blocks
from bench.chunk_slots import Slots
from bench.device_spans import busy_us, by_name, spans_of
from bench.timing import ceilings, wall_seconds
from bench.whole_step import config_of, model_of, pieces_of, tiers_of
from compute.model.model import Model
from compute.model.precision import Precision
from compute.model.routed_chunk import ChunkPlan
from compute.model.sequence import Sequence as ModelSequence
from kernels.formats.fp4_expert import Fp4Shape
from kernels.formats.k_expert import BlockShape
from kernels.routed_m1 import routed_m1
from kernels.routed_rows import routed_rows
from kernels.sum_parts import sum_parts

TOP_K, LIMIT = 6, 10.0
PRODUCT = 8192  # rows and columns of torch's product
HELD_BACK = 40_000_000  # cycles for which the device waits while launches queue up
# Tiles to try: what replaces the constants of kernels/routed_rows_layouts.py, by pairs.
SWEEP: dict[str, dict[str, Any]] = {
    "as they are": {},
    "32: 8 warps": {"WARPS": {32: 8}, "STAGES": {32: 4}, "REGISTERS": {32: 112}},
    "32: 4 stages": {"STAGES": {32: 4}},
    "64: 8 warps": {"WARPS": {64: 8}, "STAGES": {64: 3}, "REGISTERS": {64: 128}},
    "64: 3 stages": {"STAGES": {64: 3}},
    "64: one program": {"STAGES": {64: 4}, "REGISTERS": {64: 255}},
    "128: 4 warps": {"WARPS": {128: 4}, "STAGES": {128: 3}},
    "64 at least": {"PAIRS": (64, 128)},
    "64 at most": {"PAIRS": (16, 32, 64)},
}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure chunks on a GPU.")
    parser.add_argument("--quick", action="store_true", help="fewer layers and repetitions")
    parser.add_argument("--tokens", type=int, help="of a chunk; 2,048 and 8,192 if not given")
    parser.add_argument("--format", choices=["fp4", *FORMATS], default="fp4", help="of the experts")
    parser.add_argument("--sweep", action="store_true", help="try other tiles, measure no layers")
    parser.add_argument("--profile", action="store_true", help="list the kernels of the layers")
    parser.add_argument(
        "--gemv", type=int, default=0, help="most tokens of the chunks that go in both ways"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(json.dumps({"skipped": "no GPU"}))
        return 0
    repeats = 5 if args.quick else 9
    chunks = [args.tokens] if args.tokens else [2048, 8192]
    found = ceilings(repeats) | {"bf16_tflops": product_rate(repeats) / 1e12}
    torch.cuda.empty_cache()
    with torch.inference_mode():
        is_fp4 = args.format == "fp4"
        tiles = SWEEP if args.sweep and is_fp4 else {"": {}}
        found |= chunk_experts(args.format, chunks, repeats, found, tiles)
        torch.cuda.empty_cache()
        if is_fp4 and not args.sweep:
            n_layers = 4 if args.quick else 8
            found |= layers(chunks[0], n_layers, repeats, profiles=args.profile, gemv=args.gemv)
    print(json.dumps({name: round(value, 4) for name, value in found.items()}))
    return 0


def seconds(launch: Callable[[], object], repeats: int) -> float:
    """Return the median time of what `launch` launches, all of it queued before it begins."""
    launch()
    timer = partial(torch.cuda.Event, enable_timing=True)
    times = []
    for _ in range(repeats):
        begin, end = timer(), timer()
        torch.cuda.synchronize()
        torch.cuda._sleep(HELD_BACK)  # type: ignore[no-untyped-call]  # noqa: SLF001
        begin.record()
        launch()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return float(statistics.median(times))


def product_rate(repeats: int) -> float:
    """Return operations a second of torch's bf16 product of random matrices."""
    a = torch.randn(PRODUCT, PRODUCT, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(PRODUCT, PRODUCT, device="cuda", dtype=torch.bfloat16)
    return 2.0 * PRODUCT**3 / seconds(lambda: a @ b, repeats)


class Experts:
    """384 experts on the device."""

    def __init__(self) -> None:
        config = config_of(40)
        pieces, slot_bytes = pieces_of(config)
        self.hidden, self.width = config.hidden_size, config.expert_width
        self.n_experts = config.n_experts
        self.expert_bytes = sum(pieces.n_bytes)
        at = pieces.offsets
        self.shape = Fp4Shape(self.hidden, self.width, at[1] - at[0], at[3] - at[2], at[5] - at[4])
        self.slots = torch.randint(
            0, 256, (self.n_experts, slot_bytes), dtype=torch.uint8, device="cuda"
        )
        for piece in (1, 3, 5):
            self.slots[:, at[piece] : at[piece] + pieces.n_bytes[piece]].clamp_(116, 119)
        starts = self.slots.data_ptr() + torch.arange(self.n_experts) * slot_bytes
        self.pointers = torch.stack([starts + at[piece] for piece in (0, 2, 4)])


class BlockExperts:
    """384 experts of GGUF blocks on the device."""

    def __init__(self, name: str) -> None:
        config = config_of(40)
        self.hidden, self.width = config.hidden_size, config.expert_width
        self.n_experts = config.n_experts
        self.shape = BlockShape(self.hidden, self.width, *FORMATS[name])
        above, below = (self.width, self.hidden), (self.hidden, self.width)
        self.matrices = [
            random_blocks(self.n_experts, n, k, kind)
            for (n, k), kind in zip((above, above, below), FORMATS[name], strict=True)
        ]
        self.expert_bytes = sum(matrices[0].numel() for matrices in self.matrices)
        number = torch.arange(self.n_experts)
        self.pointers = torch.stack([m.data_ptr() + number * m.stride(0) for m in self.matrices])


def chunk_experts(
    kind: str,
    chunks: Sequence[int],
    repeats: int,
    rates: dict[str, float],
    tiles: dict[str, dict[str, Any]] | None = None,
) -> dict[str, float]:
    """Return what a layer's routed experts take for chunks, and their share of the roofline.

    kind   format of the experts
    rates  the ceilings: copy_tb_s, read_tb_s, bf16_tflops
    tiles  constants to try, by name; None: those of the kernels
    """
    made = Experts() if kind == "fp4" else BlockExperts(kind)
    tiles = tiles or {"": {}}
    found: dict[str, float] = {}
    for n_tokens in chunks:
        x = torch.randn(n_tokens, made.hidden, device="cuda", dtype=torch.bfloat16)
        scores = torch.rand(n_tokens, made.n_experts, device="cuda")
        picks = scores.topk(TOP_K, dim=1).indices.sort(dim=1).values.int()
        weights = torch.rand(n_tokens, TOP_K, device="cuda")
        plan = ChunkPlan(picks, weights, made.n_experts)
        pointers = made.pointers[:, plan.experts].contiguous().cuda()
        launch = partial(site, made, x, plan, pointers)
        bytes_s, work_s = least_seconds(made, plan, rates)
        for name, constants in tiles.items():
            with_tiles(constants)
            try:
                taken = seconds(launch, repeats)
            except Exception as error:  # noqa: BLE001  a tile may not fit the machine
                print(f"{n_tokens} tokens, {name}: {type(error).__name__}: {error}")
                continue
            difference = check(made, x, picks, weights, launch())
            print(
                f"{n_tokens} tokens {name:24} {taken * 1e3:7.3f} ms, bytes {bytes_s * 1e3:.3f}, "
                f"products {work_s * 1e3:.3f}, from single tokens {difference:.1e}"
            )
            label = f"experts_{n_tokens}" + (f"_{name}" if name else "")
            found |= {
                f"{label}_ms": taken * 1e3,
                f"{label}_roofline_fraction": max(bytes_s, work_s) / taken,
                f"{label}_bf16_fraction": work_s / taken,
                f"{label}_difference": difference,
            }
    with_tiles({})
    return found


def least_seconds(
    made: Experts | BlockExperts, plan: ChunkPlan, rates: dict[str, float]
) -> tuple[float, float]:
    """Return the seconds of reading a plan's experts once, and of multiplying all its pairs."""
    memory = 1e12 * max(rates["copy_tb_s"], rates["read_tb_s"])
    work = 6.0 * len(plan.tokens) * made.hidden * made.width
    return len(plan.experts) * made.expert_bytes / memory, work / (1e12 * rates["bf16_tflops"])


def site(made: Experts | BlockExperts, x: Tensor, plan: ChunkPlan, pointers: Tensor) -> Tensor:
    """Launch the routed experts of a chunk and their sum."""
    parts = routed_rows(x, plan.tokens, plan.weights, plan.starts, pointers, made.shape, LIMIT)
    return sum_parts(parts, plan.places, dtype=torch.bfloat16)


def check(
    made: Experts | BlockExperts, x: Tensor, picks: Tensor, weights: Tensor, found: Tensor
) -> float:
    """Return the largest relative difference of some tokens from the kernels for one token."""
    worst = 0.0
    for token in range(0, len(x), len(x) // 8):
        pointers = made.pointers[:, picks[token].cpu().long()].contiguous().cuda()
        wanted = routed_m1(x[token : token + 1], pointers, weights[token], made.shape, LIMIT)
        worst = max(worst, float((found[token].float() - wanted).norm() / wanted.norm()))
    return worst


_USUAL: dict[str, Any] = {}


def with_tiles(constants: dict[str, Any]) -> None:
    """Replace the constants of the kernels' tiles; those not named are the module's own."""
    from kernels import routed_rows_layouts as kernels  # noqa: PLC0415  wants a GPU's compiler

    for name in ("PAIRS", "STAGES", "WARPS", "REGISTERS"):
        usual = _USUAL.setdefault(name, getattr(kernels, name))
        other = constants.get(name, {})
        setattr(kernels, name, usual | other if isinstance(usual, dict) else other or usual)


def layers(
    n_tokens: int, n_layers: int, repeats: int, *, profiles: bool, gemv: int
) -> dict[str, float]:
    """Return what a layer takes of a first chunk, all experts on the device, routed evenly."""
    config = config_of(n_layers)
    model = model_of(config)
    tiers = tiers_of(config)
    slots = Slots(tiers, config.engram_row_bytes, pieces_of(config)[0])
    forward = partial(forward_of, model, slots)
    assert bool(forward(n_tokens).isfinite().all()), "the logits are not finite"
    taken = wall_seconds(partial(forward, n_tokens), min(repeats, 5))
    spans = spans_of(partial(forward, n_tokens))
    busy = busy_us(spans) / 1e6
    if profiles:
        for micros, count, name in by_name(spans)[:40]:
            print(f"{micros / 1000:9.3f} ms {count:6} {name[:110]}")
    print(
        f"{n_tokens} tokens through {n_layers} layers and the head: {taken * 1e3:.1f} ms, "
        f"{busy * 1e3:.1f} ms of them the device, {len(spans)} launches"
    )
    found = {
        "layers": n_layers,
        "chunk_ms": taken * 1e3,
        "layer_ms": taken / n_layers * 1e3,
        "layer_device_ms": busy / n_layers * 1e3,
        "layer_launches": len(spans) / n_layers,
        "tokens_s_of_40_layers": n_tokens / (taken / n_layers * 40),
    }
    return found | both_ways(model, forward, gemv)


def forward_of(model: Model, slots: Slots, n_tokens: int) -> Tensor:
    """Take a first chunk of random ids through the layers; the logits after it."""
    sequence = ModelSequence(model.config, n_tokens, model.device, Precision.HIGHWAY)
    ids = torch.randint(0, model.config.vocab_size, (n_tokens,)).tolist()
    return model.forward(sequence, ids, slots, slots)


def both_ways(model: Model, forward: Callable[[int], object], most_tokens: int) -> dict[str, float]:
    """Return the device's milliseconds a layer of small chunks, by either kind of kernels."""
    found = {}
    for n_tokens in range(1, most_tokens + 1):
        for name, one_by_one in (("chunk", 0), ("gemv", n_tokens)):
            model.gemv_tokens = one_by_one
            forward(n_tokens)
            busy = busy_us(spans_of(partial(forward, n_tokens))) / 1000 / model.config.n_layers
            found[f"{name}_of_{n_tokens}_layer_device_ms"] = busy
            print(f"{n_tokens} tokens by {name}: {busy:.3f} ms a layer")
    return found


if __name__ == "__main__":
    sys.exit(main())
