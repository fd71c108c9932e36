"""Every kernel's launches at the released sizes, for a compilation without a GPU.

    python tests/support/kernel_launches.py PART PARTS [--first]

compiles each PARTS-th distinct launch from PART on and prints a JSON object a line, after one with
the names of all kernels that are launched. --first: of the first launch of each kernel.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from torch import Tensor

from bench.whole_step import config_of, model_of, pieces_of
from compute.experts.tiers import ExpertTiers, expert_shape
from compute.graph.decode_step import DecodeStep
from compute.model.precision import Precision
from compute.model.sequence import Sequence
from kernels.attend_sparse import attend_sparse
from kernels.byte_planes import byte_planes
from kernels.formats.fp4_expert import Fp4Shape
from kernels.formats.k_expert import BlockShape
from kernels.fp8_to_bf16 import fp8_to_bf16
from kernels.gemm_blocks import gemm_blocks
from kernels.gemv import gemv
from kernels.gemv_blocks import gemv_blocks
from kernels.hc_collapse import hc_collapse_norm
from kernels.hc_expand import hc_expand
from kernels.hc_mix import hc_mix
from kernels.index_scores import index_scores
from kernels.plan_pairs import plan_pairs
from kernels.reference.tiled_rows import GROUPS
from kernels.round_fp8 import round_fp8
from kernels.route_m1 import route_m1, route_rows
from kernels.routed_m1 import routed_m1
from kernels.routed_m1_blocks import row_bytes
from kernels.routed_rows import routed_rows
from kernels.router_logits import router_logits
from kernels.select_blocks import select_blocks
from kernels.select_rows import select_rows
from kernels.sum_parts import sum_parts
from kernels.swiglu import swiglu
from kernels.tiled_rows import tiled_rows
from kernels.update_slots import update_slots
from protocol.files.slice_map import FP4
from tests.support import offline_gpu

BF16, F32 = torch.bfloat16, torch.float32
CONFIG = config_of(25)  # every kind of layer is among them
CHUNK = 2048
CONTEXT = 1 << 20  # of the longest searches
HIDDEN, WIDTH, LIMIT = CONFIG.hidden_size, CONFIG.expert_width, CONFIG.swiglu_limit
DENSE_FORMATS = ("Q2_K", "Q3_K", "Q4_K", "Q6_K", "Q8_0")
EXPERT_FORMATS = (("Q2_K", "Q2_K", "Q3_K"), ("Q4_K",) * 3, ("Q8_0",) * 3)


def on_gpu(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    """Return a tensor that nobody looks into."""
    return torch.empty(shape, dtype=dtype, device="cuda")


def i32(*shape: int) -> Tensor:
    """The same of i32."""
    return on_gpu(*shape, dtype=torch.int32)


def i64(*shape: int) -> Tensor:
    """The same of i64."""
    return on_gpu(*shape, dtype=torch.int64)


def u8(*shape: int) -> Tensor:
    """The same of u8."""
    return on_gpu(*shape, dtype=torch.uint8)


def a_token() -> None:
    """A whole step, as it is launched."""
    device = torch.device("cuda")
    model = model_of(CONFIG)
    pieces, slot_bytes = pieces_of(CONFIG)
    n = CONFIG.n_layers
    formats = [(FP4, FP4, FP4)] * n
    tiers = ExpertTiers([pieces] * n, formats, CONFIG.n_experts, slot_bytes, 4, device)
    tiers.set_arena(np.zeros(0, np.int64))
    sequence = Sequence(CONFIG, 8192, device, Precision.HIGHWAY)
    step = DecodeStep(model, sequence, tiers, beside=False, n_ahead=1)
    with torch.inference_mode():
        step.embed()
        for layer in (0, 1, 2, 3, 20, 24):  # one of each kind
            step.layers(layer, layer + 1)
        step.head()
        for filtered in (False, True):
            step.draw(filtered=filtered)
    update_slots(tiers.table, i32(100, 3), 4)


def _shape() -> Fp4Shape:
    pieces, _ = pieces_of(CONFIG)
    shape = expert_shape(pieces, (FP4, FP4, FP4))
    assert isinstance(shape, Fp4Shape)
    return shape


def experts() -> None:
    """One token's experts in every format and by both bodies."""
    top_k = CONFIG.top_k
    blocks = [BlockShape(HIDDEN, WIDTH, *names) for names in EXPERT_FORMATS]
    shapes: list[Fp4Shape | BlockShape] = [_shape(), *blocks]
    for shape in shapes:
        for is_plain in (False, True) if shape in shapes[:2] else (False,):
            routed_m1(on_gpu(1, HIDDEN), i64(3, top_k), on_gpu(top_k), shape, LIMIT, plain=is_plain)
    for dtype in (BF16, F32):
        byte_planes(on_gpu(1, HIDDEN, dtype=dtype))


def a_chunks_experts() -> None:
    """A chunk's experts in tiles of every size, by both bodies."""
    groups = (5, 12, 30, 60, 130, 300)
    starts = [0, *np.cumsum(groups).tolist()]
    for plain in (False, True):
        routed_rows(
            on_gpu(CHUNK, HIDDEN, dtype=BF16), i32(starts[-1]), on_gpu(starts[-1]), starts,
            i64(3, len(groups)), _shape(), LIMIT, plain=plain,
        )  # fmt: skip
    for names in EXPERT_FORMATS:
        sizes = groups if names == EXPERT_FORMATS[0] else groups[3:4]
        starts = [0, *np.cumsum(sizes).tolist()]
        routed_rows(
            on_gpu(CHUNK, HIDDEN, dtype=BF16), i32(starts[-1]), on_gpu(starts[-1]), starts,
            i64(3, len(sizes)), BlockShape(HIDDEN, WIDTH, *names), LIMIT,
        )  # fmt: skip
    parts = on_gpu(CHUNK * CONFIG.top_k, HIDDEN, dtype=BF16)
    sum_parts(parts, i32(CHUNK, CONFIG.top_k), on_gpu(CHUNK, HIDDEN, dtype=BF16), dtype=BF16)
    for form in GROUPS:
        tiled_rows(on_gpu(CHUNK, HIDDEN, dtype=BF16), form)


def routers() -> None:
    """The routers of the released model and of the largest one that they take."""
    for n_experts, top_k in ((CONFIG.n_experts, CONFIG.top_k), (1024, 16)):
        for n in (1, 9, CHUNK):
            for dtype in (BF16, F32):
                router_logits(on_gpu(n, HIDDEN), on_gpu(n_experts, HIDDEN, dtype=dtype))
        for n in (1, CHUNK):
            logits, bias = on_gpu(n, n_experts), on_gpu(n_experts)
            picks, weights = route_rows(logits, bias, top_k=top_k, routed_scale=1.5)
            plan_pairs(picks, weights, n_experts)
        route_m1(
            on_gpu(1, n_experts), bias, i32(n_experts), i64(5000), (0, 4096, 8192),
            top_k=top_k, routed_scale=1.5,
        )  # fmt: skip


def matrices() -> None:
    """Dense matrices beyond a step's own: of eight rows, in blocks, and by the plain bodies."""
    n, k, groups = 8192, 4096, 8
    for rows, plain in ((8, False), (1, True)):
        x, scales = on_gpu(rows, groups * k), u8(n // 32, k // 32)
        gemv(x, u8(n, k), scales, groups=groups, plain=plain)
        gemv(x, on_gpu(n, k, dtype=BF16), groups=groups, plain=plain)
    fp8_to_bf16(u8(1792, HIDDEN), u8(56, 160))
    for name in DENSE_FORMATS:
        for plain in (False, True):
            weight = u8(1792, row_bytes(name, HIDDEN))
            gemv_blocks(on_gpu(1, HIDDEN), weight, name, plain=plain)
        gemm_blocks(on_gpu(32, HIDDEN), weight, name)
    for dtype in (BF16, F32):
        x, gate_up = on_gpu(CHUNK, HIDDEN, dtype=dtype), on_gpu(CHUNK, 2 * WIDTH, dtype=dtype)
        round_fp8(x, dtype=BF16, out=torch.empty_like(x))
        swiglu(gate_up, LIMIT, dtype=dtype, rounds=dtype == BF16)


def attention() -> None:
    """Attention of a chunk; of a token by f32 products and in f32."""
    heads, k, r = CONFIG.n_heads, CONFIG.head_dim, CONFIG.rope_head_dim
    window, n_rows = CONFIG.sliding_window, CONFIG.index_top_k
    for tokens, splits, dtype, plain in (
        (CHUNK, 1, BF16, False),
        (1, 8, BF16, True),
        (1, 8, F32, False),
    ):
        attend_sparse(
            on_gpu(tokens, heads * k, dtype=BF16 if tokens > 1 else F32), i64(1),
            on_gpu(CONTEXT, r // 2, 2),
            on_gpu(window + tokens - 1, k, dtype=dtype), window,
            on_gpu(4096, k, dtype=dtype), i32(tokens, n_rows), on_gpu(heads), dtype=dtype,
            splits=splits, plain=plain,
        )  # fmt: skip


def selections() -> None:
    """Scores of a chunk and in f32; searches, short ones and the longest."""
    heads, k = CONFIG.index_n_heads, CONFIG.index_head_dim
    for tokens, dtype in ((CHUNK, BF16), (1, F32)):
        queries, keys = on_gpu(tokens, heads, k), on_gpu(8192, k, dtype=dtype)
        index_scores(queries, on_gpu(tokens, heads), keys, i64(1), 1, dtype=dtype)
    block, top = CONFIG.candidate_block_size, CONFIG.candidate_top_blocks
    for n_rows, dtype in ((2048, BF16), (32768, BF16), (CONTEXT, BF16), (CONTEXT, F32)):
        scores = on_gpu(1, n_rows)
        kept = select_blocks(scores, i64(1), 1, block, top, dtype=dtype)
        for blocks in (None, kept) if n_rows == CONTEXT else (None,):
            select_rows(
                    scores, i64(1), 1, CONFIG.index_top_k,
                    blocks=blocks, block_size=block, dtype=dtype,
                )  # fmt: skip


def streams() -> None:
    """The highway of a chunk."""
    n = CONFIG.hc_mult
    x, norm = on_gpu(CHUNK, n, HIDDEN, dtype=BF16), on_gpu(HIDDEN)
    lines = n * (n + 2)
    pre, post, comb = hc_mix(
        x, on_gpu(lines, n * HIDDEN), on_gpu(lines), on_gpu(lines),
        n_iterations=CONFIG.hc_sinkhorn_iters, hc_eps=CONFIG.hc_eps, norm_eps=CONFIG.norm_eps,
    )  # fmt: skip
    hc_collapse_norm(x, pre, norm, CONFIG.norm_eps, BF16)
    hc_expand(on_gpu(CHUNK, HIDDEN), x, post, comb, dtype=BF16)


CASES: tuple[Callable[[], None], ...] = (
    a_token, experts, a_chunks_experts, routers, matrices, attention, selections, streams,
)  # fmt: skip


def launches() -> list[offline_gpu.Launch]:
    """Return what all cases launch, each distinct launch once."""
    with offline_gpu.recorded() as found:
        for case in CASES:
            case()
    return offline_gpu.distinct(found)


def main(part: int, parts: int, *, first: bool) -> Iterator[dict[str, object]]:
    """Yield what the module's docstring says."""
    every = launches()
    if first:
        every = list({launch.name: launch for launch in reversed(every)}.values())[::-1]
    yield {"kernels": sorted({launch.name for launch in every}), "n_launches": len(every)}
    with tempfile.TemporaryDirectory() as folder:
        offline_gpu.without_cache(Path(folder))
        for launch in every[part::parts]:
            yield asdict(offline_gpu.compiled(launch))


if __name__ == "__main__":
    for line in main(int(sys.argv[1]), int(sys.argv[2]), first="--first" in sys.argv[3:]):
        sys.stdout.write(json.dumps(line) + "\n")
