"""How well each compressed row fits each token's query, on the device.

A fixed number of programs shares the blocks of keys that the step's last token sees, so one
captured launch serves every length and costs what is visible.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bf16_bits import round_to_bf16
from .device import interpreted, runs_kernels
from .reference import index_scores as reference
from .tensor_checks import check_contiguous, check_rows

_KEYS_A_BLOCK = {torch.bfloat16: 128, torch.float32: 32}
_PROGRAMS = 264  # two for each multiprocessor of the largest device yet
_TOKENS_A_PROGRAM = 8


@triton.jit
def _rounded(v, BF16: tl.constexpr, CASTS: tl.constexpr):
    if CASTS:
        v = v.to(tl.bfloat16).to(tl.float32)
    elif BF16:
        v = round_to_bf16(v)
    return v


@triton.jit
def _load_token(
    queries, projection, token, scale, N_HEADS: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, DIM: tl.constexpr, BF16: tl.constexpr, CASTS: tl.constexpr,
):  # fmt: skip
    head, at = tl.arange(0, HEADS), tl.arange(0, DIM)
    inside = (head < N_HEADS)[:, None] & (at < WIDTH)[None, :]
    start = queries + token.to(tl.int64) * (N_HEADS * WIDTH)
    query = tl.load(start + head[:, None] * WIDTH + at[None, :], mask=inside, other=0.0)
    weight = tl.load(projection + token * N_HEADS + head, mask=head < N_HEADS, other=0.0)
    return query, _rounded(_rounded(weight, BF16, CASTS) * scale, BF16, CASTS)


@triton.jit
def _score(query, weight, key, BF16: tl.constexpr, CASTS: tl.constexpr):
    if CASTS:
        products = tl.dot(key, tl.trans(query.to(tl.bfloat16)))
    else:
        products = tl.dot(key.to(tl.float32), tl.trans(query), input_precision="ieee")
    products = _rounded(products, BF16, CASTS)
    positive = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
    weighted = _rounded(positive * weight[None, :], BF16, CASTS)
    return _rounded(tl.sum(weighted, 1), BF16, CASTS)


@triton.jit
def _index_scores_kernel(
    queries,
    projection,
    keys,
    first,
    scores,
    n_tokens,
    n_keys,
    stride,
    ratio,
    scale,
    N_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    TOKENS: tl.constexpr,
    BF16: tl.constexpr,
    CASTS: tl.constexpr,
):
    token = tl.program_id(1) * TOKENS
    begin = tl.load(first)
    last = tl.minimum(token + TOKENS, n_tokens) - 1
    end = tl.minimum((begin + last + 1) // ratio, n_keys).to(tl.int32)
    at = tl.arange(0, DIM)
    query, weight = _load_token(
        queries, projection, token, scale, N_HEADS, HEADS, WIDTH, DIM, BF16, CASTS
    )
    for block in range(tl.program_id(0), tl.cdiv(end, KEYS), tl.num_programs(0)):
        row = block * KEYS + tl.arange(0, KEYS)
        inside = (row < end)[:, None] & (at < WIDTH)[None, :]
        where = row.to(tl.int64)[:, None] * WIDTH + at[None, :]
        key = tl.load(keys + where, mask=inside, other=0.0)
        if TOKENS == 1:
            value = _score(query, weight, key, BF16, CASTS)
            value = tl.where(row < end, value, -float("inf"))
            tl.store(scores + token.to(tl.int64) * stride + row, value, mask=row < n_keys)
        else:
            for i in range(last + 1 - token):
                one = token + i
                query, weight = _load_token(
                    queries, projection, one, scale, N_HEADS, HEADS, WIDTH, DIM, BF16, CASTS
                )
                value = _score(query, weight, key, BF16, CASTS)
                value = tl.where(row < (begin + one + 1) // ratio, value, -float("inf"))
                target = scores + one.to(tl.int64) * stride + row
                tl.store(target, value, mask=row < n_keys)


def index_scores(
    queries: Tensor,
    head_projection: Tensor,
    keys: Tensor,
    first: Tensor,
    ratio: int,
    *,
    dtype: torch.dtype,
    scores: Tensor | None = None,
) -> Tensor:
    """Score rows: score[t, g] = sum over heads of hw[t, h] * relu(iq[t, h] . key[g]).

    queries          [T, heads, k] f32, contiguous, exact in `dtype`
    head_projection  [T, heads] f32, contiguous, the raw product: cast to `dtype`, times
                     (k * heads)^-0.5 and cast again it is hw
    keys             [G, k] `dtype`, contiguous; rows that no token sees are not read
    first            [1] i64, the position of token 0; token t sees rows below
                     (first + t + 1) // ratio
    returns          [T, G] f32, rows contiguous, in `scores` where given: rows that a token does
                     not see are -inf there, or left as they were; without `scores` they are -inf

    In bf16 each of product, relu, weighting and head sum is rounded as in `reference.index_scores`.
    Bits equal its bits as long as f32 holds both sums exactly. It does for products of fp4-rounded
    rows unless the scales of a pair's groups are more than 2^11 apart, but not for all sums of
    heads: where the order of summation matters, a score on a rounding tie moves by one bf16 ulp (of
    its largest term, where terms cancel). In f32 within 1e-6 of the largest term.
    Raises ValueError on a shape or dtype that differs. Source: model specification, section 3.5.
    """
    n_tokens, n_heads, dim = queries.shape
    n_keys = len(keys)
    _check(queries, head_projection, keys, dtype)
    if scores is None:
        shape = (n_tokens, n_keys)
        scores = torch.full(shape, -torch.inf, dtype=torch.float32, device=keys.device)
    check_rows("index_scores", scores=scores)
    if tuple(scores.shape) != (n_tokens, n_keys) or scores.dtype != torch.float32:
        raise ValueError(f"index_scores: scores are {tuple(scores.shape)}")
    scale = dim**-0.5 * n_heads**-0.5
    if not runs_kernels(keys):
        weights = head_projection.to(dtype) * scale
        tokens = torch.arange(1, n_tokens + 1, device=keys.device)
        hidden = torch.arange(n_keys, device=keys.device) >= ((first + tokens) // ratio)[:, None]
        found = reference.index_scores(queries, keys, weights)
        return scores.copy_(found.masked_fill(hidden, -torch.inf))
    if n_tokens and n_keys:
        tokens_each = 1 if n_tokens == 1 else _TOKENS_A_PROGRAM
        bf16, keys_each = dtype == torch.bfloat16, _KEYS_A_BLOCK[dtype]
        grid = (
            min(triton.cdiv(n_keys, keys_each), _PROGRAMS),
            triton.cdiv(n_tokens, tokens_each),
        )
        _index_scores_kernel[grid](
            queries, head_projection, keys, first, scores, n_tokens, n_keys, scores.stride(0),
            ratio, scale, N_HEADS=n_heads, HEADS=max(16, triton.next_power_of_2(n_heads)),
            WIDTH=dim, DIM=max(16, triton.next_power_of_2(dim)), KEYS=keys_each,
            TOKENS=tokens_each, BF16=bf16, CASTS=bf16 and not interpreted(), num_warps=4,
            num_stages=3 if bf16 else 1,
        )  # fmt: skip
    return scores


def _check(queries: Tensor, projection: Tensor, keys: Tensor, dtype: torch.dtype) -> None:
    n_tokens, n_heads, dim = queries.shape
    if tuple(projection.shape) != (n_tokens, n_heads) or keys.shape[1] != dim:
        raise ValueError(
            f"index_scores: projection {tuple(projection.shape)} and keys {tuple(keys.shape)} "
            f"for queries {tuple(queries.shape)}"
        )
    if keys.dtype != dtype or dtype not in {torch.bfloat16, torch.float32}:
        raise ValueError(f"index_scores: keys are {keys.dtype}, wanted {dtype}")
    if not queries.dtype == projection.dtype == torch.float32:
        raise ValueError(
            f"index_scores: queries are {queries.dtype}, projection {projection.dtype}, wanted f32"
        )
    check_contiguous("index_scores", queries=queries, head_projection=projection, keys=keys)
