"""The coefficients that one sublayer mixes the residual streams with, in two launches.

The projection reads two megabytes for one token, so its columns are spread over many programs, each
leaving its part of the sums; a second launch adds the parts in ascending order and finishes.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import runs_kernels
from .early_launch import early, join_previous
from .reference import hc_mix as reference
from .tensor_checks import check_contiguous, check_tensor

_COLUMNS = 256  # of the flattened streams, a program
_TOKENS = 16  # of a chunk, a program: each reads the projection's columns once for all of them


@triton.jit
def _hc_mix_dot_kernel(
    streams,
    fn,
    parts,
    columns,
    n_tokens,
    N_LINES: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    EARLY: tl.constexpr,
):
    join_previous(EARLY)
    part = tl.program_id(0)
    at = part * COLUMNS + tl.arange(0, COLUMNS)
    line = tl.arange(0, LINES)
    inside = at < columns
    mask = (line < N_LINES)[:, None] & inside[None, :]
    matrix = tl.load(fn + line[:, None] * columns + at[None, :], mask=mask, other=0.0)
    for turn in range(TOKENS):
        token = tl.program_id(1) * TOKENS + turn
        if token < n_tokens:
            row = streams + token.to(tl.int64) * columns
            v = tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
            out = parts + (token * tl.num_programs(0) + part) * (LINES + 1)
            tl.store(out + line, tl.sum(matrix * v[None, :], 1))
            tl.store(out + LINES, tl.sum(v * v, 0))


@triton.jit
def _hc_mix_finish_kernel(
    parts,
    scale,
    base,
    pre,
    post,
    comb,
    n_parts,
    columns,
    hc_eps,
    norm_eps,
    N_ITERATIONS: tl.constexpr,
    N_STREAMS: tl.constexpr,
    LINES: tl.constexpr,
    EARLY: tl.constexpr,
):
    join_previous(EARLY)
    token = tl.program_id(0)
    parts += token * n_parts * (LINES + 1)
    stream = tl.arange(0, N_STREAMS)
    square = (2 + stream)[:, None] * N_STREAMS + stream[None, :]
    first = tl.zeros([N_STREAMS], tl.float32)
    second = tl.zeros([N_STREAMS], tl.float32)
    c = tl.zeros([N_STREAMS, N_STREAMS], tl.float32)
    squares = 0.0
    for part in range(n_parts):  # ascending: the order decides bits
        at = parts + part * (LINES + 1)
        first += tl.load(at + stream)
        second += tl.load(at + N_STREAMS + stream)
        c += tl.load(at + square)
        squares += tl.load(at + LINES)
    inverse = tl.rsqrt(squares / columns + norm_eps)
    first = first * inverse * tl.load(scale + stream) + tl.load(base + stream)
    second = second * inverse * tl.load(scale + N_STREAMS + stream)
    second += tl.load(base + N_STREAMS + stream)
    c = c * inverse * tl.load(scale + square) + tl.load(base + square)
    tl.store(pre + token * N_STREAMS + stream, tl.sigmoid(first) + hc_eps)
    tl.store(post + token * N_STREAMS + stream, 2.0 * tl.sigmoid(second))
    c = tl.exp(c - tl.max(c, 1)[:, None])
    c = c / tl.sum(c, 1)[:, None] + hc_eps
    c = c / (tl.sum(c, 0)[None, :] + hc_eps)
    for _ in range(N_ITERATIONS - 1):
        c = c / (tl.sum(c, 1)[:, None] + hc_eps)
        c = c / (tl.sum(c, 0)[None, :] + hc_eps)
    out = comb + token * N_STREAMS * N_STREAMS
    tl.store(out + stream[:, None] * N_STREAMS + stream[None, :], c)


def hc_mix(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    n_iterations: int,
    hc_eps: float,
    norm_eps: float,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Project the streams to (pre, post, comb); comb is made doubly stochastic.

    streams  [T, S, H] bf16 or f32, contiguous, S a power of two
    fn       [S * (S + 2), S * H] f32, contiguous
    scale    [S * (S + 2)] f32, contiguous, base the same
    returns  pre [T, S], post [T, S], comb [T, S, S], all f32, in `out` where given

    Raises ValueError on a shape, dtype or stride that differs. Within 1e-5 of `reference.hc_mix`;
    a token's bits do not depend on the others. Source: model specification, section 3.1.
    """
    n_tokens, n, width = streams.shape
    lines = n * (n + 2)
    check_contiguous("hc_mix", streams=streams)
    check_tensor("hc_mix", "fn", fn, (lines, n * width), torch.float32)
    check_tensor("hc_mix", "scale", scale, (lines,), torch.float32)
    check_tensor("hc_mix", "base", base, (lines,), torch.float32)
    if out is not None:
        shapes = ((n_tokens, n), (n_tokens, n), (n_tokens, n, n))
        for at, (tensor, shape) in enumerate(zip(out, shapes, strict=True)):
            check_tensor("hc_mix", f"out[{at}]", tensor, shape, torch.float32)
    if not runs_kernels(streams) or n & (n - 1):
        found = reference.hc_mix(
            streams, fn, scale, base, n_iterations=n_iterations, hc_eps=hc_eps, norm_eps=norm_eps
        )
        for target, value in zip(out or (), found, strict=False):
            target.copy_(value)
        return found if out is None else out
    n_parts, padded = triton.cdiv(n * width, _COLUMNS), triton.next_power_of_2(lines)
    new = partial(torch.empty, dtype=torch.float32, device=streams.device)
    parts = new((n_tokens, n_parts, padded + 1))
    pre, post, comb = out or (new((n_tokens, n)), new((n_tokens, n)), new((n_tokens, n, n)))
    if n_tokens:
        tokens = 1 if n_tokens < _TOKENS else _TOKENS
        _hc_mix_dot_kernel[(n_parts, triton.cdiv(n_tokens, tokens))](
            streams, fn, parts, n * width, n_tokens, N_LINES=lines, LINES=padded,
            COLUMNS=_COLUMNS, TOKENS=tokens, **early(streams.device),
        )  # fmt: skip
        _hc_mix_finish_kernel[(n_tokens,)](
            parts, scale, base, pre, post, comb, n_parts, n * width, hc_eps, norm_eps,
            N_ITERATIONS=n_iterations, N_STREAMS=n, LINES=padded, num_warps=1,
            **early(streams.device),
        )  # fmt: skip
    return pre, post, comb
