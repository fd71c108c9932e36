"""How much of an Engram value each residual stream takes, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bf16_bits import round_to_bf16
from .device import runs_kernels
from .reference import engram_gate as reference
from .tensor_checks import check_contiguous, check_rows


@triton.jit
def _load_cast(kv, at, inside, BF16: tl.constexpr):
    value = tl.load(kv + at, mask=inside, other=0.0).to(tl.float32)
    if BF16:
        value = round_to_bf16(value)
    return value


@triton.jit
def _engram_gate_kernel(
    streams,
    kv,
    weight,
    out,
    width,
    stride,
    eps,
    root_width,
    N_STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    BF16: tl.constexpr,
    BF16_STREAMS: tl.constexpr,
):
    stream, token = tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < width
    kv += token.to(tl.int64) * stride
    line = (token.to(tl.int64) * N_STREAMS + stream) * width
    h = tl.load(streams + line + at, mask=inside, other=0.0).to(tl.float32)
    key = _load_cast(kv + stream * width, at, inside, BF16)
    value = _load_cast(kv + N_STREAMS * width, at, inside, BF16)
    dot = tl.sum(h * tl.load(weight + stream * width + at, mask=inside, other=0.0) * key, 0)
    dot = dot * tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(h * h, 0), width * 1.0) + eps))
    dot = dot * tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(key * key, 0), width * 1.0) + eps))
    dot = dot * root_width
    root = tl.sqrt_rn(tl.maximum(tl.abs(dot), 1e-6, propagate_nan=tl.PropagateNan.ALL))
    root = tl.where(dot < 0, -root, root)
    result = h + tl.div_rn(1.0, 1.0 + tl.exp(-root)) * value
    if BF16_STREAMS:
        result = round_to_bf16(result)
    tl.store(out + line + at, result, mask=inside)


def engram_gate(
    streams: Tensor,
    kv: Tensor,
    weight: Tensor,
    eps: float,
    *,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """Add the value to each stream, gated by how the stream agrees with its key.

    streams  [T, S, H] bf16 or f32, contiguous
    kv       [T, (S + 1) * H] f32 or `dtype`, rows contiguous: the raw product, S keys and the
             value; cast to `dtype` first
    weight   [S, H] f32, contiguous, the product of query and key weights
    returns  [T, S, H], dtype of streams, in `out` where given, which may be `streams`

    Raises ValueError on a shape or dtype that differs. Within 2e-6 (relative, f32) of
    `reference.engram_gate`; in bf16 a value on a rounding tie may move by one ulp.
    Source: model specification, section 3.2, Update.
    """
    n_tokens, n_streams, width = streams.shape
    kinds = {torch.float32, dtype}
    if tuple(kv.shape) != (n_tokens, (n_streams + 1) * width) or kv.dtype not in kinds:
        raise ValueError(
            f"engram_gate: kv {tuple(kv.shape)} {kv.dtype} for streams {tuple(streams.shape)}"
        )
    if tuple(weight.shape) != (n_streams, width):
        raise ValueError(
            f"engram_gate: weight {tuple(weight.shape)} for streams {tuple(streams.shape)}"
        )
    if out is None:
        out = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    if out.shape != streams.shape or out.dtype != streams.dtype:
        raise ValueError(f"engram_gate: out is {tuple(out.shape)} {out.dtype}")
    check_contiguous("engram_gate", streams=streams, weight=weight, out=out)
    check_rows("engram_gate", kv=kv)
    if not runs_kernels(streams):
        parts = kv.to(dtype).float()
        keys = parts[:, : n_streams * width].unflatten(1, (n_streams, width))
        value = parts[:, n_streams * width :]
        return out.copy_(reference.engram_gate(streams, keys, value, weight, eps))
    if n_tokens:
        block = triton.next_power_of_2(width)
        _engram_gate_kernel[(n_streams, n_tokens)](
            streams, kv, weight, out, width, kv.stride(0), eps, width**-0.5, N_STREAMS=n_streams,
            BLOCK=block, BF16=dtype == torch.bfloat16,
            BF16_STREAMS=streams.dtype == torch.bfloat16, num_warps=min(16, max(1, block // 256)),
            enable_fp_fusion=False,
        )  # fmt: skip
    return out
