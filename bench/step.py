"""Speed of the parts of one decode step on a GPU, each as a share of what the memory gives.

    python bench/step.py [--quick] [--layers N] [--rows M] [--format fp4|q2k-q3k|q4k|q8_0]
                         [--miss-rate R]

Weights of the released sizes are made on the device, more of each than its cache holds, and each
part is replayed as one graph. --format is of the experts, in the whole step and in chunks too; the
step's dense weights are official ones, GGUF's are measured apart. The ceilings, a kernel that
copies and one that only reads, are measured in the same run, and so are a chunk's experts beside
torch's matrix product: see bench/prefill.py. With --miss-rate tokens with R misses are measured
too, their experts read by a daemon from files under /var/tmp: see bench/miss_rate.py. Prints one
JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import block_parts
from bench.draw_parts import draw_parts
from bench.in_place import in_place
from bench.index_parts import index_parts
from bench.prefill import chunk_experts, product_rate
from bench.timing import ceilings, seconds
from bench.whole_step import OFFICIAL, whole_step
from kernels.attend_sparse import attend_sparse
from kernels.formats.fp4_expert import Fp4Shape
from kernels.gemv import gemv
from kernels.norm_latents import norm_latents
from kernels.round_fp8 import round_fp8
from kernels.routed_m1 import routed_m1
from kernels.router_logits import router_logits

HIDDEN, WIDTH, N_EXPERTS, TOP_K, LIMIT = 5120, 2304, 384, 6, 10.0
BYTES = 3 * (WIDTH * HIDDEN // 2 + WIDTH * HIDDEN // 32)
CACHE_BYTES = 400_000_000
HEADS, HEAD, ROPE, Q_RANK, WINDOW = 64, 512, 64, 1280, 128
# name: matrix rows, columns, fp8 or bf16, groups
MATRICES = {
    "wq_a": (1280, 5120, True, 1),
    "wq_b": (32768, 1280, True, 1),
    "wkv": (512, 5120, True, 1),
    "wq_a_wkv": (1792, 5120, True, 1),  # as a step launches the two
    "index_wq_b": (4096, 1280, True, 1),
    "index_weights": (32, 5120, False, 1),
    "compressor": (1024, 5120, False, 1),
    "wo_a": (8192, 4096, True, 8),
    "wo_b": (5120, 8192, True, 1),
    "shared_gate_up": (4608, 5120, True, 1),
    "shared_down": (5120, 2304, True, 1),
    "engram_wkv": (25600, 6144, True, 1),
    "head": (129280, 5120, False, 1),
}


def main() -> int:
    """Measure and print."""
    args = parse_arguments()
    if not torch.cuda.is_available():
        print(json.dumps({"skipped": "no GPU"}))
        return 0
    n_layers, repeats = (min(args.layers, 8), 5) if args.quick else (args.layers, 7)
    found = {"layers": n_layers, **ceilings(repeats)}
    if args.format == "fp4":
        found |= experts(n_layers, repeats)
    else:
        found |= block_parts.block_experts(args.format, n_layers, repeats)
    best = max(found["copy_tb_s"], found["read_tb_s"])
    found["experts_fraction"] = found["experts_tb_s"] / best
    for name, shape in MATRICES.items():
        micros, tb_s = matrix(*shape, args.rows, repeats)
        found |= {f"{name}_us": micros, f"{name}_fraction": tb_s / best}
        print(f"{name:16} {micros:8.2f} us  {tb_s:5.2f} TB/s  {tb_s / best:.2f} of {best:.2f}")
    if args.format != "fp4":
        for name, stored in block_parts.MATRICES.items():
            micros, tb_s = block_parts.block_matrix(*stored, args.rows, repeats)
            found |= {f"{name}_us": micros, f"{name}_fraction": tb_s / best}
            print(f"{name:20} {micros:8.2f} us  {tb_s:5.2f} TB/s  {tb_s / best:.2f} of {best:.2f}")
    for name, micros in [router_part(args.rows, repeats), *attention_parts(repeats).items()]:
        found[name] = micros
        print(f"{name:24} {micros:8.2f} us")
    found |= index_parts(repeats) | draw_parts(repeats)
    if args.format == "fp4":
        found |= in_place(2 if args.quick else 8, repeats)
    found["bf16_tflops"] = product_rate(repeats) / 1e12
    found |= chunk_experts(args.format, [2048] if args.quick else [2048, 8192], repeats, found)
    torch.cuda.empty_cache()
    formats = block_parts.FORMATS.get(args.format, OFFICIAL)
    whole = whole_step(n_layers, repeats, best, formats)
    for name, value in whole.items():
        print(f"{name:24} {value:8.2f}")
    found |= whole
    if args.miss_rate:
        from bench.miss_rate import at_rate  # noqa: PLC0415 - starts a daemon

        torch.cuda.empty_cache()
        found |= at_rate(args.miss_rate, n_layers, quick=args.quick)
    figures = {name: round(value, 4) for name, value in found.items()}
    print(json.dumps({"format": args.format, **figures}))
    return 0


def parse_arguments() -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(description="Measure the parts of one decode step.")
    parser.add_argument("--quick", action="store_true", help="fewer layers and repetitions")
    parser.add_argument("--layers", type=int, default=40, help="layers of experts")
    parser.add_argument("--rows", type=int, default=1, help="rows for the dense products, 1 to 8")
    formats = ("fp4", *block_parts.FORMATS)
    parser.add_argument("--format", choices=formats, default="fp4", help="of the experts")
    parser.add_argument("--miss-rate", type=int, default=0, help="misses a token, one a layer")
    args = parser.parse_args()
    n_layers = min(args.layers, 8) if args.quick else args.layers
    if not 0 <= args.miss_rate <= n_layers:
        parser.error(f"--miss-rate {args.miss_rate}: wanted 0 to {n_layers}, one a layer")
    return args


def experts(n_layers: int, repeats: int) -> dict[str, float]:
    """Return bytes of experts read in a second over all layers, and the time of one layer."""
    matrix, scales = WIDTH * HIDDEN // 2, WIDTH * HIDDEN // 32
    piece = matrix + scales
    slots = torch.randint(0, 256, (n_layers * TOP_K, BYTES), dtype=torch.uint8, device="cuda")
    for i in range(3):
        at = i * piece + matrix
        slots[:, at : at + scales].clamp_(118, 124)
    shape = Fp4Shape(HIDDEN, WIDTH, matrix, matrix, matrix)
    starts = slots.data_ptr() + torch.arange(n_layers * TOP_K) * BYTES
    table = torch.stack([starts + i * piece for i in range(3)], 0).view(3, n_layers, TOP_K)
    pointers = [table[:, layer].contiguous().cuda() for layer in range(n_layers)]
    x = torch.randn(1, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weights = torch.rand(TOP_K, device="cuda")
    taken = seconds(lambda: [routed_m1(x, at, weights, shape, LIMIT) for at in pointers], repeats)
    n_bytes = n_layers * TOP_K * BYTES
    return {"experts_tb_s": n_bytes / taken / 1e12, "layer_us": taken / n_layers * 1e6}


def matrix(
    n: int, k: int, fp8_tiles: bool, groups: int, rows: int, repeats: int
) -> tuple[float, float]:
    """Return microseconds of one product and its weights' bytes in TB/s."""
    n_bytes = n * k * (1 if fp8_tiles else 2)
    copies = max(4, CACHE_BYTES // n_bytes)
    scales = None
    if fp8_tiles:
        weight = torch.randint(0, 120, (copies, n, k), dtype=torch.uint8, device="cuda")
        scales = torch.randint(110, 120, (copies, n // 32, k // 32), device="cuda").byte()
    else:
        weight = torch.randn(copies, n, k, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(rows, groups * k, device="cuda")

    def launch() -> None:
        for copy in range(copies):
            gemv(x, weight[copy], None if scales is None else scales[copy], groups=groups)

    taken = seconds(launch, repeats) / copies
    return taken * 1e6, n_bytes / taken / 1e12


def router_part(rows: int, repeats: int) -> tuple[str, float]:
    """Return microseconds of one layer's logits, whose additions wait for each other."""
    copies = CACHE_BYTES // (N_EXPERTS * HIDDEN * 2)
    weight = torch.randn(copies, N_EXPERTS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(rows, HIDDEN, device="cuda").bfloat16().float()

    def launch() -> None:
        for layer in weight:
            router_logits(x, layer)

    return "router_us", seconds(launch, repeats) / copies * 1e6


def attention_parts(repeats: int) -> dict[str, float]:
    """Return microseconds of the operators between the projections of attention, each alone.

    One token, where the name does not say otherwise; 512 rows selected.
    """
    bf16, first = torch.bfloat16, torch.tensor([3000], device="cuda")
    turns = torch.randn(4096, ROPE // 2, 2, device="cuda")
    projected = torch.randn(1, Q_RANK + HEAD, device="cuda")
    q_norm, kv_norm = torch.rand(Q_RANK, device="cuda"), torch.rand(HEAD, device="cuda")
    ring = torch.zeros(WINDOW, HEAD, device="cuda", dtype=bf16)

    def norm() -> None:
        for _ in range(32):
            norm_latents(
                projected, q_norm, kv_norm, first, turns, 1e-20, dtype=bf16, rounds=True, ring=ring
            )

    def round_() -> None:
        for _ in range(32):
            round_fp8(projected)

    return {
        "norm_latents_us": seconds(norm, repeats) / 32 * 1e6,
        "round_fp8_us": seconds(round_, repeats) / 32 * 1e6,
        "attend_us": attention(1, 512, 10, first, turns, repeats),
        "attend_8_splits_us": attention(1, 512, 8, first, turns, repeats),
        "attend_unsplit_us": attention(1, 512, 1, first, turns, repeats),
        "attend_window_us": attention(1, 0, 2, first, turns, repeats),
        "attend_chunk_of_512_us": attention(512, 512, 1, first, turns, repeats),
    }


def attention(
    n_tokens: int, n_selected: int, splits: int, first: Tensor, turns: Tensor, repeats: int
) -> float:
    """Return microseconds of sparse attention over rows from more than the cache holds."""
    rows = torch.empty(CACHE_BYTES // HEAD // 2, HEAD, device="cuda", dtype=torch.bfloat16)
    rows.normal_()
    copies = 32 if n_tokens == 1 else 2
    ring = torch.randn(WINDOW + n_tokens - 1, HEAD, device="cuda").bfloat16()
    q, sink = torch.randn(n_tokens, HEADS * HEAD, device="cuda"), torch.randn(HEADS, device="cuda")
    picks = torch.randint(0, len(rows), (copies, n_tokens, n_selected), device="cuda")
    picks = picks.sort(2).values.int()

    def launch() -> None:
        for listed in picks:
            chosen = listed if n_selected else None
            attend_sparse(
                q, first, turns, ring, WINDOW, rows if n_selected else None, chosen, sink,
                dtype=ring.dtype, splits=splits,
            )  # fmt: skip

    return seconds(launch, repeats) / copies * 1e6


if __name__ == "__main__":
    raise SystemExit(main())
