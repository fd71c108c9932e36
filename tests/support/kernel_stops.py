"""The smallest launches that reach every kernel of the room, its masks and its edges, on a GPU.

Sizes are odd where a kernel takes odd ones: rows, columns and groups then end within a program.
"""

from __future__ import annotations

from kernels.attend_sparse import attend_sparse
from kernels.bring import bring
from kernels.byte_planes import byte_planes, empty_planes
from kernels.draw import draw
from kernels.engram_gate import engram_gate
from kernels.engram_rows import engram_rows
from kernels.fp8_to_bf16 import fp8_to_bf16
from kernels.hc_collapse import hc_collapse_norm
from kernels.hc_expand import hc_expand
from kernels.hc_mix import hc_mix
from kernels.index_keys import index_keys
from kernels.index_queries import index_queries
from kernels.index_scores import index_scores
from kernels.likeliest import likeliest
from kernels.norm_latents import norm_latents
from kernels.plan_pairs import plan_pairs
from kernels.pool_latents import pool_latents
from kernels.prepared_rows import prepared_rows
from kernels.q8_1_rows import q8_1_rows
from kernels.round_fp8 import round_fp8
from kernels.route_m1 import route_m1, route_rows
from kernels.router_logits import router_logits
from kernels.select_blocks import select_blocks
from kernels.select_rows import select_rows
from kernels.sum_parts import sum_parts
from kernels.swiglu import swiglu
from kernels.tiled_rows import tiled_rows
from kernels.update_slots import update_slots
from tests.support import expert_stops
from tests.support.stop_tensors import (
    BF16,
    EPS,
    F32,
    LIMIT,
    ROWS,
    Stops,
    codes,
    i32,
    i64,
    into,
    numbers,
    scale_codes,
    strided,
    turns_to,
)  # fmt: skip

STOPS: Stops = dict(expert_stops.STOPS)


@into(STOPS, "attend_sparse._attend_kernel", "attend_sparse._merge_kernel")
def _attention() -> None:
    heads, k, window, n_rows = 3, 48, 70, 11
    for rows in ROWS:
        for dtype, splits, plain in ((BF16, 1, False), (BF16, 2, False), (F32, 1, True)):
            attend_sparse(
                numbers(rows, heads * k), i64([100]), turns_to(100 + rows, 8),
                numbers(window + rows - 1, k, dtype=dtype), window, numbers(n_rows, k, dtype=dtype),
                i32([[0, 3, n_rows - 1, -1, 7, -1, -1]] * rows), numbers(heads),
                dtype=dtype, splits=splits, plain=plain,
            )  # fmt: skip


@into(STOPS, "norm_latents._norm_latents_kernel")
def _latents() -> None:
    for rows in ROWS:
        for q, k, rounds in ((96, 64, True), (45, 22, False)):
            norm_latents(
                strided(rows, q + k), numbers(q), numbers(k), i64([4]), turns_to(4 + rows, 4), EPS,
                dtype=BF16, rounds=rounds, ring=numbers(9, k, dtype=BF16),
            )  # fmt: skip


@into(STOPS, "pool_latents._pool_latents_kernel")
def _pooling() -> None:
    for rows in ROWS:
        for ratio, width, first in ((1, 48, 5), (4, 80, 3)):
            n_rows = (first + rows) // ratio
            kv, scores = (None if ratio == 1 else numbers(ratio, width) for _ in range(2))
            pool_latents(
                strided(rows, width if ratio == 1 else 2 * width), i64([first]), ratio, kv, scores,
                numbers(width), turns_to(first + rows, 4), numbers(n_rows, width, dtype=BF16), EPS,
                dtype=BF16, rounds=True,
            )  # fmt: skip


@into(STOPS, "index_keys._index_keys_kernel")
def _keys() -> None:
    for rows in ROWS:
        for ratio, first in ((1, 5), (4, 3)):
            n_keys, width = (first + rows) // ratio, 96
            given = strided(rows if ratio == 1 else rows // ratio + 1, width)
            index_keys(
                given, i64([first]), rows, ratio, numbers(width), turns_to(first + rows, 4),
                numbers(n_keys, width, dtype=BF16), EPS, dtype=BF16, rounds=True,
            )  # fmt: skip


@into(STOPS, "index_queries._index_queries_kernel")
def _queries() -> None:
    for rows in ROWS:
        turns = turns_to(5 + rows, 4)
        index_queries(strided(rows, 5 * 96), i64([5]), turns, dim=96, dtype=BF16, rounds=True)


@into(STOPS, "index_scores._index_scores_kernel")
def _scores() -> None:
    for rows in ROWS:
        for dtype in (BF16, F32):
            n_keys = (400 + rows) // 3
            keys = numbers(n_keys, 48, dtype=dtype)
            out = strided(rows, n_keys)
            heads = numbers(rows, 5)
            index_scores(numbers(rows, 5, 48), heads, keys, i64([400]), 3, dtype=dtype, scores=out)


@into(
    STOPS,
    "select_blocks._select_blocks_kernel",
    "select_rows._select_rows_kernel",
    "top_keys.narrow_kernel",
)
def _selections() -> None:
    # So many that they are narrowed twice; and a few.
    for rows, n, top in ((2, 40001, 8192), (1, 45, 7), (9, 45, 7)):
        first = i64([3 * n])
        kept = select_blocks(strided(rows, 2 * n - 1), first, 1, 2, top, dtype=BF16)
        select_rows(strided(rows, 2 * n - 1), first, 1, top, blocks=kept, block_size=2, dtype=BF16)
        select_rows(strided(rows, n), first, 2, top, dtype=BF16)


@into(STOPS, "likeliest._likeliest_parts_kernel", "likeliest._likeliest_kernel")
def _likeliest() -> None:
    for n in (1, 3001):
        likeliest(numbers(n))


@into(
    STOPS,
    "draw._sum_weights_kernel",
    "draw._draw_kernel",
    "draw_best._weigh_kernel",
    "draw_best._gather_kernel",
    "draw_best._draw_best_kernel",
)
def _draws() -> None:
    one = 0x3F800000
    for n in (1, 3001):
        logits = numbers(n)
        best = likeliest(logits)
        draw(logits, best, i64([one, 0, 0, 1, 1 << 62]), filtered=False)
        for top_k, share in ((7, 0), (0, 1 << 62), (2500, 1 << 62)):
            draw(logits, best, i64([one, top_k, share, 1, 1 << 62]), filtered=True)


@into(STOPS, "route_m1._route_m1_kernel", "route_m1._route_rows_kernel")
def _routing() -> None:
    for n_experts, top_k in ((45, 3), (300, 5)):
        bias = numbers(n_experts)
        # A slot each, none, or one that does not exist.
        table = i32([(slot % 9) - 1 for slot in range(n_experts)])
        route_m1(
            numbers(1, n_experts), bias, table, i64([1 << 20] * 7), (0, 256, 512), top_k=top_k,
            routed_scale=1.5,
        )  # fmt: skip
        for rows in ROWS:
            route_rows(numbers(rows, n_experts), bias, top_k=top_k, routed_scale=1.5)


@into(STOPS, "router_logits._router_logits_kernel", "router_logits_layouts._router_rows_kernel")
def _routers() -> None:
    for rows in ROWS:
        for n, k in ((45, 100), (7, 37)):
            for x_dtype, dtype in ((F32, BF16), (F32, F32), (BF16, BF16)):
                x = strided(rows, k).to(x_dtype)
                router_logits(x, numbers(n, k, dtype=dtype))


@into(STOPS, "update_slots._update_slots_kernel")
def _slots() -> None:
    table = i32([[-1] * 45] * 3)
    for n in (1, 135):
        update_slots(table, i32([[at // 45, at % 45, at % 7 - 1] for at in range(n)]), 6)


@into(STOPS, "bring._bring_kernel")
def _bytes_of_the_host() -> None:
    for n in (3, 4100):
        bring(i32(list(range(n))), i32([0] * n))


@into(STOPS, "byte_planes._byte_planes_kernel")
def _planes() -> None:
    for rows in ROWS:
        byte_planes(numbers(rows, 160, dtype=BF16))


@into(STOPS, "q8_1_rows._q8_1_rows_kernel")
def _rows_of_q8_1() -> None:
    for rows in ROWS:
        q8_1_rows(numbers(rows, 160))


@into(STOPS, "tiled_rows._tiled_rows_kernel")
def _rows_in_tiles() -> None:
    for rows in ROWS:
        for form in ("D4", "D2S6"):
            tiled_rows(numbers(rows, 160), form)
            tiled_rows(numbers(rows, 160), form, i32([rows - 1, 0, rows - 1]), spare=2)


@into(STOPS, "round_fp8._round_fp8_kernel")
def _rounded() -> None:
    for rows in ROWS:
        round_fp8(numbers(rows, 96), dtype=BF16)


@into(STOPS, "swiglu._swiglu_kernel")
def _activations() -> None:
    for rows in ROWS:
        swiglu(numbers(rows, 2 * 96), LIMIT, dtype=BF16, rounds=True)


@into(STOPS, "fp8_to_bf16._fp8_to_bf16_kernel")
def _dequantised() -> None:
    for n, k in ((1, 33), (45, 700)):
        fp8_to_bf16(codes(n, k), scale_codes(-(-n // 32), -(-k // 32)))


@into(STOPS, "prepared_rows._prepared_rows_kernel")
def _prepared() -> None:
    for rows in ROWS:
        x = numbers(rows, 160, dtype=BF16)
        prepared_rows(x)
        prepared_rows(x, i32([rows - 1, 0, rows - 1]))


@into(STOPS, "plan_pairs._plan_pairs_kernel")
def _plans() -> None:
    for rows in (*ROWS, 700):
        picks = i32([[token % 5, 5, 6 + token % 3] for token in range(rows)])
        plan_pairs(picks, numbers(rows, 3), 11)


@into(STOPS, "sum_parts._sum_parts_kernel")
def _sums() -> None:
    for rows in ROWS:
        parts, shared = numbers(20, 1100, dtype=BF16), numbers(rows, 1100, dtype=BF16)
        places = i32([[19, token, 2 * token] for token in range(rows)])
        sum_parts(parts, places, dtype=BF16)
        sum_parts(parts, places, shared, dtype=BF16)
    sum_parts(numbers(3, 300), None, numbers(1, 300), dtype=BF16, present=i64([1, 0, 1]))


@into(STOPS, "hc_mix._hc_mix_dot_kernel", "hc_mix._hc_mix_finish_kernel")
def _mixes() -> None:
    n, lines = 4, 24
    for rows in (*ROWS, 17):
        hc_mix(
            numbers(rows, n, 75, dtype=BF16), numbers(lines, n * 75), numbers(lines),
            numbers(lines), n_iterations=3, hc_eps=EPS, norm_eps=EPS,
        )  # fmt: skip


@into(STOPS, "hc_collapse._hc_collapse_norm_kernel")
def _collapses() -> None:
    for rows in ROWS:
        streams = numbers(rows, 4, 75, dtype=BF16)
        hc_collapse_norm(streams, numbers(rows, 4), numbers(75), EPS, BF16)
        hc_collapse_norm(
            numbers(rows, 4, 1056, dtype=BF16), numbers(rows, 4), numbers(1056), EPS, BF16,
            rounded=numbers(rows, 1056), planes=empty_planes(rows, 1056, streams.device),
        )  # fmt: skip


@into(STOPS, "hc_expand._hc_expand_kernel")
def _expands() -> None:
    for rows in ROWS:
        streams, mixes = numbers(rows, 4, 300, dtype=BF16), (numbers(rows, 4), numbers(rows, 4, 4))
        hc_expand(numbers(rows, 300), streams, *mixes, shared=numbers(rows, 300), dtype=BF16)
    mixes, streams = (numbers(1, 4), numbers(1, 4, 4)), numbers(1, 4, 300, dtype=BF16)
    hc_expand(numbers(3, 300), streams, *mixes, present=i64([1, 0, 1]), dtype=BF16)


@into(STOPS, "engram_gate._engram_gate_kernel")
def _gates() -> None:
    for rows in ROWS:
        streams = numbers(rows, 4, 300, dtype=BF16)
        engram_gate(streams, strided(rows, 5 * 300), numbers(4, 300), EPS, dtype=BF16)


@into(STOPS, "engram_rows._engram_rows_kernel")
def _rows() -> None:
    for row_format, n_bytes in (("E4M3", 264), ("Q8_0", 272), ("Q2_K", 84)):
        for rows in ROWS:
            data = codes((rows * 3 - 1) * (n_bytes + 5) + n_bytes)
            data = data.as_strided((rows * 3, n_bytes), (n_bytes + 5, 1))
            engram_rows(data, 256, dtype=BF16, rounds=True, row_format=row_format, columns=3)
